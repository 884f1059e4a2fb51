"""Early exit's bench without an engine: what it counts, compares and refuses to overlook."""

import pytest

from meridian_patch.bench.exit.arm_figures import all_figures, best_fixed
from meridian_patch.bench.exit.arms import CAP, ExitArm, budget, cap, eat, natural, plan_stages
from meridian_patch.bench.exit.checks import ThinkTokens, find_violations
from meridian_patch.bench.exit.run import ExitArmRun, Result
from meridian_patch.cli import main

MARKERS = ThinkTokens(start=256, end=257)
GOOD = "6\nFrom p=7, q=p+5, r=q*3 we get r=6."
STEP = "q=p+5=7+5=2"


def rules(ids, answer, forced=(), *, is_cut=False):
    found = find_violations("eat", "q?", ids, forced, answer, MARKERS, is_cut=is_cut)
    return [each.rule for each in found]


@pytest.mark.parametrize("answer", [GOOD, "6", " 6"])
def test_an_answer_breaks_no_rule(answer):
    """With its reason and without; the forced boundary itself is fine."""
    assert rules([1, 2, 257, 5], answer, forced=[2]) == []


def test_a_second_boundary_is_found():
    """Be it an end or a start."""
    assert rules([1, 257, 5, 257], "6") == ["second boundary"]
    assert rules([1, 257, 5, 256], "6") == ["second boundary"]


def test_a_forced_token_behind_the_boundary_is_found():
    """And said to be ours."""
    [found] = find_violations("eat", "q?", [1, 257, 5], [1, 2], "6", MARKERS, is_cut=False)
    assert found.rule == "forced behind the boundary"
    assert found.is_ours


@pytest.mark.parametrize("answer", [f"6\n{STEP}", f"{STEP}\n6", f"6\n{STEP}\nFrom p=7 we get p=7."])
def test_reasoning_in_the_answer_is_found(answer):
    """Also in one that was cut; the chain behind "From" is none."""
    assert rules([1, 257, 5], answer, is_cut=True) == ["reasoning in the answer"]


def test_an_answer_of_another_form_is_found():
    """Unless it was cut or there is none."""
    assert rules([1, 257, 5], "") == ["answer of another form"]
    assert rules([1, 257, 5], "6\nFrom p=7, q") == ["answer of another form"]
    assert rules([1, 257, 5], "6\nFrom p=7, q", is_cut=True) == []
    assert rules([1, 2, 3], None) == []


def test_a_broken_rule_without_a_close_is_not_ours():
    """Models break them by themselves."""
    [found] = find_violations("natural", "q?", [1, 257, 257], [], "6", MARKERS, is_cut=False)
    assert not found.is_ours


def arm_run(arm: ExitArm, results, stage="exits", **totals):
    return ExitArmRun(stage, arm, [Result(*each) for each in results], totals, [], 1.0)


NATURAL = arm_run(natural(), [(100, True, ""), (300, True, ""), (100, False, "")] * 100)
SETS = {"exits": "main", "bounds": "main", "ngram": "few"}


def test_figures_are_against_natural():
    """Ratio of all tokens, points of accuracy, lost and won; the intervals hold them."""
    ours = arm_run(
        eat(),
        [(50, True, "eat"), (150, False, "eat"), (100, True, "natural")] * 100,
        probes=600,
        probe_tokens=3000,
    )
    figures = all_figures([NATURAL, ours], SETS)[1]
    assert figures.think_ratio == pytest.approx(0.6)
    assert figures.difference_pp == pytest.approx(0)
    assert (figures.lost, figures.won) == (100, 100)
    assert 1 / 3 < figures.lost_bound < 0.4
    assert (figures.probes, figures.probe_tokens) == (2, 10)
    assert figures.reasons == {"eat": 200, "natural": 100}
    low, high = figures.difference_pp_interval
    assert low < 0 < high
    low, high = figures.think_ratio_interval
    assert low < 0.6 < high


def test_without_a_natural_arm_nothing_is_compared():
    """Other problems' natural thoughts say nothing."""
    figures = all_figures([NATURAL, arm_run(eat(), [(9, True, "eat")], "ngram")], SETS)[1]
    assert (figures.think_ratio, figures.difference_pp, figures.lost_bound) == (None, None, None)


def test_the_best_fixed_budget_keeps_accuracy():
    """The cheapest within half a point, of its kind alone."""

    def points(share):
        return [(100, n >= share, "") for n in range(300)]

    runs = [
        arm_run(natural(), points(0)),
        arm_run(cap(64), [(50, *each[1:]) for each in points(3)], "bounds"),
        arm_run(cap(128), [(80, *each[1:]) for each in points(1)], "bounds"),
        arm_run(cap(256), points(0), "bounds"),
        arm_run(budget(64), [(50, *each[1:]) for each in points(0)], "bounds"),
    ]
    assert best_fixed(all_figures(runs, SETS), CAP).arm == "cap 128"
    assert best_fixed(all_figures(runs[:2], SETS), CAP) is None


def test_every_special_stage_has_its_engine():
    """Speculation is greedy, pressure has a small pool, and vLLM's budgets a reasoning config."""
    stages = {stage.name: stage for stage in plan_stages([64, 128], 3.0, 60)}
    assert stages["ngram"].temperature == 0
    assert stages["pressed"].engine["num_gpu_blocks_override"] == 60
    assert stages["bounds"].needs_budget
    assert [arm.name for arm in stages["bounds"].arms] == [
        "cap 64",
        "cap 128",
        "budget 64",
        "budget 128",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--problems", "0"], "--problems"),
        (["--budgets", "64,x"], "--budgets"),
        (["--stages", "bounds"], "--stages"),
        (["--profile", "missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_arguments_are_refused(options, message, capsys):
    """Before anything is started."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", "exit", *options])
    assert ended.value.code != 0
    assert message in capsys.readouterr().err
