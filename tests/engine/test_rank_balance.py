"""Two engine cores in lock step, a mixture of experts between them: balance on and off.

Prints, with ``-s``, what both ranks did in each round of the crowd.
"""

import pytest
from matrix_checks import STARTS_RANKS
from rank_runs import HEADER, ROUNDS, figures, of_ranks, whole_tokens

pytestmark = [
    pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(560), STARTS_RANKS,
]  # fmt: skip

NAMES = ("off", "on")


@pytest.fixture(scope="module")
def arms(rank_arms):
    return {name: rank_arms[name] for name in NAMES}


def test_every_request_ends(arms):
    for arm in arms.values():
        for run in ROUNDS:
            outputs = arm["runs"][run]["outputs"]
            # The clients of two leave.
            assert sum(out["finished"] for out in outputs.values()) == len(outputs) - 2
        interrupted = arm["runs"]["interrupted"]
        assert all(out["finished"] for out in interrupted["outputs"].values())
        for core in interrupted["cores"]:
            assert core["counts"] == [0, 0]
            assert not core["counted"].get("fallback:exception")


def test_ranks_met(arms):
    for name, arm in arms.items():
        cores = [core for core in arm["status"] if core.get("role") == "engine_core"]
        assert len(cores) == 2
        for core in cores:
            assert ("balance" in core["rules"]) == (name == "on")
            assert not core["rules_off"]


def test_ranks_cut_steps_for_each_other(arms, cell):
    """With the rule ranks cut steps for answers of the other one, and no token changes."""
    for run in ROUNDS:
        assert all(of_ranks(arms["on"], run, "heard_steps"))
        assert not any(of_ranks(arms["off"], run, "heard_steps"))
    tokens = whole_tokens(arms["on"])
    assert tokens == whole_tokens(arms["off"])
    cores = arms["on"]["runs"]["interrupted"]["cores"]
    cut = sum(sum(of_ranks(arms["on"], run, "cut_steps")) for run in ROUNDS)
    assert cut > 0
    note = f"{len(tokens)} requests as without the rule; it cut {cut} steps for the other rank"
    probes = sum(core["counted"].get("probe:measured", 0) for core in cores)
    measured = f"{probes} measured" if probes else "none is due"
    cell.works("data parallel 2, `policy.balance`", note, measured)


def test_figures(arms):
    rows = [row for name, arm in arms.items() for row in figures(name, arm)]
    print("", HEADER, *rows, sep="\n")
    assert all(sum(of_ranks(arm, run, "steps")) for arm in arms.values() for run in ROUNDS)
