"""Live figures of two ranks in lock step: off, on, on again, off again.

    python -P -m pytest -s tests/engine/test_rank_figures.py

What differs between two arms of one setting is chance. Takes four to seven minutes on two cores.
"""

import pytest
from rank_runs import HEADER, ROUNDS, figures, of_ranks, whole_tokens

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(400)]


# In turns, so that a drift of the machine touches both settings.
@pytest.mark.parametrize("name", ["off", "on", "on again", "off again"])
def test_arm(name, rank_arms):
    arm = rank_arms[name]
    print("", HEADER, *figures(name, arm), f"{arm['seconds']:.0f} s with its start", sep="\n")
    assert whole_tokens(arm) == whole_tokens(rank_arms["off"])
    for run in ROUNDS:
        heard = of_ranks(arm, run, "heard_steps")
        assert all(heard) if name.startswith("on") else not any(heard)
