"""`benches.py policy-micro` times what it says it times."""

import json
from contextlib import closing

import benches
import pytest
from micro.policy import ARMS, STOCK, ChatLoad
from micro.scheduler_times import OWN, SCHEDULE, UPDATE, PolicyMicro

from meridian_patch.replay.types import ReplayArm


def test_all_arms_do_the_same_work_and_stay_full():
    """The same tokens in every step, as many requests as asked for, and answers first in ours."""
    arms = [ReplayArm(STOCK), *(ReplayArm(name, True, values) for name, values in ARMS.items())]
    with closing(PolicyMicro(arms, running=12, waiting=5, draw=ChatLoad(12, seed=1).draw)) as micro:
        micro.settle()
        for _ in range(300):
            seconds = dict(micro.step())
            assert set(seconds) == {STOCK, *ARMS}
            assert all({SCHEDULE, UPDATE} < set(calls) for calls in seconds.values())
            own = [(seconds[arm][OWN[call]], seconds[arm][call]) for arm in ARMS for call in OWN]
            assert all(0 < part < whole for part, whole in own)
    lanes = {lane.name: lane.engine for lane in micro.lanes}
    assert micro.preemptions == 0
    assert len({engine.totals.steps for engine in lanes.values()}) == 1
    orders = {}
    for name, engine in lanes.items():
        scheduler = engine.scheduler
        # Those that ended in the last step are being replaced.
        assert 10 <= len(scheduler.running) <= 12
        assert 3 <= len(scheduler.waiting) <= 7
        orders[name] = [request.request_id for request in scheduler.running]
    assert orders[STOCK] == orders["noop"] != orders["latency"]
    assert set(orders[STOCK]) == set(orders["latency"])


def test_the_command_writes_its_figures(tmp_path, capsys):
    """Each call of each arm, its cost over stock, and how it was obtained."""
    options = ["--running", "8", "--waiting", "0,4", "--steps", "20", "--deep", "300"]
    with pytest.raises(SystemExit) as ended:
        benches.main(["policy-micro", *options, "--out", str(tmp_path)])
    assert ended.value.code == 0
    report = json.loads((tmp_path / "policy-micro.json").read_text())
    assert report["provenance"] == "measured-cpu"
    assert not report["is_interrupted"]
    rows = {(row["waiting"], row["arm"], row["call"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 2 * 4 * 2
    for (_, arm, _), row in rows.items():
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert ("extra_us" in row) == (arm != STOCK)
        assert ("own_us" in row) == (arm in ARMS)
    deep = report["deep_queue"]
    assert deep["waiting"] >= 250
    assert deep["most_displaced"] > 0
    assert {"cut", "make room", "order", "place an arrival"} <= set(deep["operations"])
    assert all(0 < row["p50_us"] <= row["max_us"] for row in deep["operations"].values())
    assert "extra over stock" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--running", "0"), ("--waiting", "-1"), ("--steps", "x")]
)
def test_a_wrong_number_is_one_sentence(tmp_path, capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        benches.main(["policy-micro", option, value, "--out", str(tmp_path)])
    assert ended.value.code not in (0, None)
    assert f"{option} is '{value}'" in capsys.readouterr().err


def test_ctrl_c_writes_what_was_measured(tmp_path, monkeypatch):
    """The sizes that were done are kept; the exit status says that it is not all."""
    from micro import policy as policy_micro

    def interrupted(running, *args):
        if running == 9:
            raise KeyboardInterrupt
        return measure(running, *args)

    measure = policy_micro.measure
    monkeypatch.setattr(policy_micro, "measure", interrupted)
    options = ["--running", "8,9", "--waiting", "0", "--steps", "5", "--deep", "0"]
    with pytest.raises(SystemExit) as ended:
        benches.main(["policy-micro", *options, "--out", str(tmp_path)])
    assert ended.value.code == 130
    report = json.loads((tmp_path / "policy-micro.json").read_text())
    assert report["is_interrupted"]
    assert {row["running"] for row in report["rows"]} == {8}
