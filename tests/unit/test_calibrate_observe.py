"""The three passes, the journal behind them, and what is written, on a toy model."""

import json
from itertools import pairwise

import pytest
from calibration_toys import (
    LINES,
    WIDTH,
    ToyEngine,
    toy_observer,
    toy_prompts,
    toy_subject,
)

from meridian_patch.calibrate.chains import answer_begin, find_chain
from meridian_patch.calibrate.engine_process import Reply
from meridian_patch.calibrate.journal import Journal
from meridian_patch.calibrate.outcome import Goal, check_naturals, decide
from meridian_patch.calibrate.profile import render_profile
from meridian_patch.calibrate.report import verdict, write_report
from meridian_patch.calibrate.thresholds import EAT, RPDI
from meridian_patch.config.load import load_config
from meridian_patch.config.schema import Config
from meridian_patch.errors import CalibrationError
from meridian_patch.phase.boundaries import Boundaries

SETTINGS = {"model": "toy"}
GOAL = Goal(0.05, 0.95, {EAT: EAT.thresholds})
ORIGIN = {
    "model": {"name": "toy"},
    "data": "toy.jsonl",
    "data_sha256": "0" * 64,
    "problems": 100,
    "problems_without_thought": 0,
    "date": "2026-01-01T00:00:00+00:00",
    "command": "meridian calibrate",
    "machine": "a machine",
}
# Known after 2 to 6 of 10 lines.
KNOWN = [2 + index % 5 for index in range(100)]


def observe(path, engine, known=KNOWN, **subject):
    with Journal(path, SETTINGS) as journal:
        observer, seen = toy_observer(journal, engine, toy_subject(**subject))
        naturals = observer.naturals(toy_prompts(known))
        return naturals, observer.records(naturals), observer.early_answers, seen


def test_a_strategy_that_waits_until_it_knows(tmp_path):
    """Flat entropies: two equal probes after it knows, and right every time."""
    naturals, records, answers, seen = observe(tmp_path / "j", ToyEngine())
    assert [len(natural.thought) for natural in naturals] == [LINES * WIDTH] * 100
    assert all(natural.is_correct and natural.answer_tokens == 1 for natural in naturals)
    (outcome,) = decide(naturals, records, answers, GOAL)
    assert outcome.chosen.lost == 0
    assert outcome.chosen.saving_ratio > 0.3
    assert outcome.mean_answer_tokens == 1
    tokens = outcome.mean_think_tokens
    assert all(careful >= bold for careful, bold in pairwise(tokens))
    assert outcome.calibration.curve[-1].lost > 0
    assert [stage for stage, done, total in seen if done == total] == ["natural", "probes", "early"]


def test_only_places_that_a_threshold_reaches_first_are_answered(tmp_path):
    """No more early answers than thresholds, and every one is a stop of a record."""
    _, records, answers, _ = observe(tmp_path / "j", ToyEngine())
    stops = {(r.problem, stop.think_tokens) for r in records[EAT] for stop in r.stops}
    assert stops == set(answers)
    assert 0 < len(answers) < 100 * LINES


@pytest.mark.parametrize("die_after", [0, 50, 300, 1200])
def test_an_interrupted_run_goes_on(tmp_path, die_after):
    """What was replied is kept; a line cut off is asked for again; the result is the same."""
    path, dying = tmp_path / "j", ToyEngine(die_after)
    with pytest.raises(KeyboardInterrupt):
        observe(path, dying)
    with path.open("ab") as file:
        file.write(b'{"key": "natu')
    second = ToyEngine()
    _, records, _, _ = observe(path, second)
    assert not set(dying.asked) & set(second.asked)
    _, expected, _, _ = observe(tmp_path / "whole", ToyEngine())
    assert records == expected
    third = ToyEngine()
    observe(path, third)
    assert third.asked == []


def test_replies_of_other_settings_are_refused(tmp_path):
    """A sentence that names the file and what differs."""
    observe(tmp_path / "j", ToyEngine(), KNOWN[:3])
    with pytest.raises(CalibrationError, match="with model 'toy', and now it is 'other'"):
        Journal(tmp_path / "j", {"model": "other"})
    (tmp_path / "k").write_text("hello\n")
    with pytest.raises(CalibrationError, match="line 1, is not what a calibration has written"):
        Journal(tmp_path / "k", SETTINGS)


def test_more_problems_ask_only_for_what_is_missing(tmp_path):
    """And a problem whose prompt changed is another one."""
    observe(tmp_path / "j", ToyEngine(), KNOWN[:10])
    more = ToyEngine()
    observe(tmp_path / "j", more, KNOWN[:12])
    assert {key.split("/")[1] for key in more.asked} == {"10", "11"}
    other = ToyEngine()
    observe(tmp_path / "j", other, [9, *KNOWN[1:12]])
    assert {key.split("/")[1] for key in other.asked} == {"0"}


def test_rpdi_needs_measured_thoughts(tmp_path):
    """Thoughts without entropies are thought again; with them they serve EAT too."""
    observe(tmp_path / "j", ToyEngine(), KNOWN[:3])
    engine = ToyEngine()
    _, records, _, _ = observe(tmp_path / "j", engine, KNOWN[:3], thresholds={RPDI: (1.5,)})
    assert [key.split("/")[0] for key in engine.asked] == ["measured"] * 3
    assert [record.stops for record in records[RPDI]] == [[]] * 3
    again = ToyEngine()
    observe(tmp_path / "j", again, KNOWN[:3])
    assert again.asked == []


@pytest.mark.parametrize(
    ("kind", "what"), [(EAT, "none of 1000 probes"), (RPDI, "none of the think tokens")]
)
def test_a_model_that_cannot_be_measured_is_refused(tmp_path, kind, what):
    """NaN logits, or a runner that the tap does not fit: no threshold would ever be reached."""

    class UnsampledThoughts(ToyEngine):
        def run(self, requests):
            for key, reply in super().run(requests):
                measured = reply.entropies and [float("nan")] * len(reply.entropies)
                yield key, Reply(reply.ids, measured)

    with pytest.raises(CalibrationError, match=what):
        observe(tmp_path / "j", UnsampledThoughts(), thresholds={kind: kind.thresholds})


def test_an_all_wrong_model_is_refused_before_anything_is_probed(tmp_path):
    """Nothing to calibrate."""
    engine = ToyEngine(natural_answer="3")
    with Journal(tmp_path / "j", SETTINGS) as journal:
        observer, _ = toy_observer(journal, engine)
        naturals = observer.naturals(toy_prompts(KNOWN))
    with pytest.raises(CalibrationError, match="only 0 of 100 natural answers are right"):
        check_naturals(naturals, GOAL)
    assert {key.split("/")[0] for key in engine.asked} == {"natural"}


def test_a_model_that_does_not_think_is_refused(tmp_path):
    """Its outputs are left out, and none is left."""

    class Silent(ToyEngine):
        def _reply(self, request):
            return super()._reply(request)._replace(ids=[257, 55])

    with pytest.raises(CalibrationError, match="none of 3 outputs holds a thought of family toy"):
        observe(tmp_path / "j", Silent(), KNOWN[:3])


@pytest.mark.parametrize(
    ("count", "goal"), [(58, GOAL), (400, Goal(0.01, 0.95, {EAT: (), RPDI: ()}))]
)
def test_too_few_problems(count, goal):
    """The sentence says how many are needed, and how many one strategy alone would need."""
    with pytest.raises(CalibrationError) as refused:
        goal.check_count(count, "data file x")
    assert f"data file x: {count} problems are too few" in str(refused.value)
    assert f"at least {goal.trials_needed}" in str(refused.value)
    goal.check_count(goal.trials_needed, "data file x")
    if len(goal.thresholds) > 1:
        assert "or 299 for one alone (--strategies eat)" in str(refused.value)


def test_strategies_share_loss_and_risk():
    """A strategy that ends a thought loses it, so that losses and risks add up."""
    goal = Goal(0.02, 0.9, {EAT: (), RPDI: ()})
    assert (goal.tolerance, goal.risk) == (pytest.approx(0.01), pytest.approx(0.05))


def test_the_profile_is_a_configuration(tmp_path):
    """It loads, says what was chosen, and where it is from; nothing is closed by it alone."""
    naturals, records, answers, _ = observe(tmp_path / "j", ToyEngine())
    outcomes = decide(naturals, records, answers, GOAL)
    config = Config(exit={"eat_alpha": 0.9, "max_think_tokens": 900, "answer_reserve": 0.5})
    path = tmp_path / "profile.yaml"
    path.write_text(render_profile(config, outcomes, GOAL, ORIGIN))
    loaded = load_config({"MERIDIAN_PATCH_CONFIG": str(path)})
    chosen = loaded.config.exit
    assert (chosen.mode, chosen.eat, chosen.rpdi) == ("observe", True, False)
    assert (chosen.eat_alpha, chosen.max_think_tokens, chosen.answer_reserve) == (0.9, None, None)
    assert chosen.eat_delta == outcomes[0].chosen.threshold
    assert loaded.origins["exit.eat_delta"] == f"file {path}"
    provenance = loaded.config.provenance
    assert (provenance["model"], provenance["epsilon"]) == ({"name": "toy"}, 0.05)
    assert len(provenance["curve"]["eat"]) == len(EAT.thresholds)


def test_the_report_holds_curve_and_verdict(tmp_path):
    """A page that needs no other file, and the same as JSON."""
    naturals, records, answers, _ = observe(tmp_path / "j", ToyEngine())
    outcomes = decide(naturals, records, answers, GOAL)
    page, result = write_report(tmp_path, naturals, outcomes, GOAL, ORIGIN)
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert verdict(outcomes[0], GOAL).partition(".")[0] in text
    data = json.loads(result.read_text())
    rows = data["strategies"]["eat"]["curve"]
    assert len(rows) == len(EAT.thresholds)
    assert len(rows[0]) == len(data["curve_columns"])
    assert data["natural"]["accuracy"] == 1.0
    assert len(data["problems"]) == 100


def test_no_safe_threshold_is_said(tmp_path):
    """Closed before it knows, whatever the threshold."""
    naturals, records, answers, _ = observe(tmp_path / "j", ToyEngine(), thresholds={EAT: (100.0,)})
    (outcome,) = decide(naturals, records, answers, GOAL._replace(thresholds={EAT: (100.0,)}))
    assert outcome.chosen is None
    assert "no threshold saves think tokens" in verdict(outcome, GOAL)


TWO = Boundaries("two", ((1, 2),), ((8, 9), (9,)), (8, 9))


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([5, 1, 2], [3, 4, 8, 9, 6], (0, 2, 4)),
        ([5, 1, 2], [3, 4, 9, 6], (0, 2, 3)),
        ([5], [1, 2, 3, 8, 9, 6], (2, 3, 5)),
        ([5, 1], [2, 3, 8, 9], (1, 2, 4)),
        ([5, 1, 2], [3, 4], (0, 2, None)),
        ([5, 1, 2], [3, 8, 9, 6, 1, 2, 4, 8, 9, 7], (0, 1, 9)),
        ([5], [3, 8, 9, 6], None),
        ([5, 1, 2, 8, 9], [3, 4], None),
    ],
)
def test_thought_and_answer_are_found_by_tokens(prompt, output, expected):
    """Markers of several tokens, across the prompt's end, twice, or not at all."""
    assert find_chain(prompt, output, TWO) == expected


def test_an_answer_begins_behind_a_second_boundary():
    """A model may think on behind a forced close."""
    assert answer_begin([3, 4], TWO) == 0
    assert answer_begin([3, 4, 8, 9, 6], TWO) == 4
