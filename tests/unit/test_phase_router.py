"""The per-request phase state machine."""

from spoken import SpokenRouter

from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.tracker import Phase

START, END, WORD = 1, 2, 9
SIMPLE = Boundaries("test", ((START,),), ((END,),), (END,))
LONG = Boundaries("test", ((5, 6, 7),), ((8, 8, 3),), (8, 8, 3))


def phase(router, request_id="r"):
    state = router.get(request_id)
    return state.phase if state else None


def test_prompt_that_opened_thinking():
    """The first token of a request whose prompt ends in an open thought is thinking."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [WORD, START, WORD])
    assert phase(router) is Phase.PREFILL
    assert router.say("r", [WORD])
    assert phase(router) is Phase.THINK


def test_prompt_that_closed_thinking():
    """Disabled thinking leaves a closed thought in the prompt: the request answers."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [START, END])
    router.say("r", [WORD])
    assert phase(router) is Phase.ANSWER
    assert router.num_reasoning == 0


def test_prompt_without_boundaries_answers_until_the_model_opens_a_thought():
    """A model that opens its thought itself is thinking from that token on."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [WORD])
    router.say("r", [START])
    assert phase(router) is Phase.THINK
    assert router.num_reasoning == 1


def test_boundary_and_reentry():
    """An end marker hands off to the answer and a new start marker takes it back."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [START])
    assert router.say("r", [WORD])
    assert not router.say("r", [WORD])
    assert router.say("r", [END])
    state = router.get("r")
    assert (state.phase, state.think_tokens, state.is_handed_off) == (Phase.ANSWER, 3, True)
    assert not router.say("r", [WORD])
    assert router.say("r", [START])
    assert phase(router) is Phase.THINK
    assert router.num_reasoning == 1


def test_second_end_marker_changes_nothing():
    """Only the first end marker of a thought is a boundary."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [START])
    router.say("r", [WORD, END, WORD])
    assert not router.say("r", [END])
    assert phase(router) is Phase.ANSWER


def test_boundary_inside_accepted_drafts():
    """One step may bring the last thought, the boundary and the first answer tokens."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [START])
    router.say("r", [WORD, WORD, END, WORD, WORD])
    state = router.get("r")
    assert (state.phase, state.tokens_in_phase, state.think_tokens) == (Phase.ANSWER, 2, 3)


def test_multi_token_boundary_across_steps():
    """A marker of several tokens is found when steps cut it anywhere."""
    router = SpokenRouter(LONG)
    router.add("r", [5, 6])
    router.say("r", [7])
    assert phase(router) is Phase.THINK
    for token in (8, 8, 8):
        router.say("r", [token])
        assert phase(router) is Phase.THINK
    router.say("r", [3])
    assert phase(router) is Phase.ANSWER


def test_handoff_end_is_reported():
    """The answer token that ends the hand-off is reported once, for handed-off answers only."""
    router = SpokenRouter(SIMPLE, handoff_tokens=2)
    router.add("r", [START])
    router.add("plain", [WORD])
    router.say("r", [END])
    router.say("plain", [WORD])
    assert [router.say("r", [WORD]) for _ in range(3)] == [False, True, False]
    assert [router.say("plain", [WORD]) for _ in range(3)] == [False, False, False]


def test_only_the_step_that_may_end_a_handoff_is_looked_at():
    """Several tokens a step may pass its end; within it, words change nothing."""
    router = SpokenRouter(SIMPLE, handoff_tokens=6)
    router.add("r", [START])
    router.runs("r")
    router.say("r", [WORD])
    router.say("r", [END])
    router.say("r", [WORD])  # the marker is over
    assert router.expects([[WORD]], {"r": 0}) == {}
    router.say("r", [WORD] * 3)
    assert router.expects([[WORD]], {"r": 0}) == {}
    assert router.expects([[WORD] * 2], {"r": 0}) == {"r": 7}
    assert router.say("r", [WORD] * 4)
    assert router.expects([[WORD]], {"r": 0}) == {}


def test_a_pooling_model_samples_nothing():
    router = SpokenRouter(SIMPLE)
    router.add("r", [WORD])
    router.runs("r")
    assert router.expects([], {"r": 0}) == {}


def test_single_phase_model():
    """Without boundaries every request answers from its first token."""
    router = SpokenRouter(None)
    router.add("r", [START])
    router.say("r", [WORD])
    assert phase(router) is Phase.ANSWER


def test_unknown_and_empty_are_harmless():
    """Tokens of untracked requests and empty steps change nothing."""
    router = SpokenRouter(SIMPLE)
    assert not router.say("nobody", [END])
    router.add("r", [START])
    assert not router.say("r", [])
    assert phase(router) is Phase.PREFILL
    router.remove("nobody")
    router.remove("r")
    assert len(router) == 0
    assert set(router.counts.values()) == {0}


def test_adding_again_starts_over():
    """A streaming session that goes on is judged by all its tokens."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [START])
    router.say("r", [WORD, END, WORD])
    router.add("r", [START, WORD, END, WORD, START])
    router.say("r", [WORD])
    assert phase(router) is Phase.THINK
    assert len(router) == 1
    assert sum(router.counts.values()) == 1


def test_entered_phases_are_counted_once():
    """Every change of phase is reported to the statistics exactly once."""
    router = SpokenRouter(SIMPLE)
    router.add("r", [START])
    router.say("r", [WORD, END, START])
    assert router.drain_entered() == {Phase.THINK: 2, Phase.ANSWER: 1}
    assert router.drain_entered() == {}
