"""Properties of the phase tracker over random streams."""

from hypothesis import given
from hypothesis import strategies as st
from spoken import SpokenTracker

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import Phase

# Few ids and markers that share tokens, so that partial matches are common.
TOKEN = st.integers(0, 4)
START, END = ((1, 2), (1, 1, 3)), ((2, 3), (4,))
BOUNDARIES = Boundaries("test", START, END, (4,))


def phase_by_search(prompt, tokens):
    """The phase after ``tokens`` by looking at every suffix: obvious and slow."""
    thinking = False
    seen = []
    for token in [*prompt, *tokens]:
        seen.append(token)
        if any(tuple(seen[-len(m) :]) == m for m in START):
            thinking = True
        elif any(tuple(seen[-len(m) :]) == m for m in END):
            thinking = False
    return Phase.THINK if thinking else Phase.ANSWER


@given(st.lists(TOKEN), st.lists(st.lists(TOKEN, max_size=4), min_size=1))
def test_phase_equals_plain_search_however_steps_cut_the_stream(prompt, steps):
    """The automaton's phase is the one a search over the whole text gives."""
    tracker = SpokenTracker(BOUNDARIES)
    tracker.add("r", prompt)
    for step in steps:
        tracker.say("r", step)
    tokens = [token for step in steps for token in step]
    expected = phase_by_search(prompt, tokens) if tokens else Phase.PREFILL
    assert tracker.get("r").phase is expected


OPERATION = st.tuples(st.sampled_from(["add", "remove", "observe"]), st.integers(0, 5))


@given(st.lists(st.tuples(OPERATION, st.lists(TOKEN, max_size=5))))
def test_counts_always_add_up_and_nothing_leaks(operations):
    """Counts by phase sum to the tracked requests, and removal leaves nothing."""
    tracker = SpokenTracker(BOUNDARIES)
    for (operation, number), tokens in operations:
        request_id = f"r{number}"
        if operation == "add":
            tracker.add(request_id, tokens)
        elif operation == "remove":
            tracker.remove(request_id)
        else:
            tracker.say(request_id, tokens)
        assert sum(tracker.counts.values()) == len(tracker)
        assert min(tracker.counts.values()) >= 0
        assert 0 <= tracker.num_reasoning <= len(tracker)
    for number in range(6):
        tracker.remove(f"r{number}")
    assert len(tracker) == tracker.num_reasoning == 0
    assert set(tracker.counts.values()) == {0}
