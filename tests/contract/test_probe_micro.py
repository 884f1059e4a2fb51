"""`benches.py probe-micro` times what it says it times."""

import json

import benches
import pytest
from micro.probe import CALLS, PLAIN, PROBED, ProbeMicro


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
def test_every_second_step_has_a_probe(is_v2):
    micro = ProbeMicro(500, is_v2=is_v2)
    probes, made = micro._scheduler.early_exit.probes, []
    make = probes._make
    probes._make = lambda *args: made.append(args) or make(*args)
    seen = micro.measure(500, 20)
    assert len(made) == len(seen[PLAIN]) == len(seen[PROBED]) == 20
    assert all(set(seconds) == set(CALLS) for side in seen.values() for seconds in side)
    # What is computed of it is a block and the trial boundary at most.
    assert probes.most_computed_tokens <= probes._block_size + probes.suffix_tokens
    assert not micro._scheduler.phase_counters.totals.get("fallback:exception")


def test_the_command_writes_its_figures(tmp_path, capsys):
    options = ["--context", "200,400", "--rounds", "5", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        benches.main(["probe-micro", *options])
    assert ended.value.code == 0
    report = json.loads((tmp_path / "probe-micro.json").read_text())
    assert report["provenance"] == "measured-cpu"
    assert [(row["runner"], row["context"]) for row in report["rows"]] == [
        ("v1", 200),
        ("v1", 400),
        ("v2", 200),
        ("v2", 400),
    ]
    assert all(set(row["added_ms"]) == set(CALLS) for row in report["rows"])
    assert "CPU time that a probe adds" in capsys.readouterr().out
