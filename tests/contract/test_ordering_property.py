"""The incremental running order against a sort of everybody, under whatever upstream may do."""

from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from spoken import SpokenTracker

from meridian_patch.engine.scheduler.running_order import RunningOrder
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.policy.levels import Levels
from meridian_patch.policy.running_order import LatencyPolicy, RequestView

START, END, WORD = 1, 2, 3
BOUNDARIES = Boundaries("test", ((START,),), ((END,),), (END,))
PROTECTED = 3
PLACE = st.integers(0, 10**6)


class Request(SimpleNamespace):
    """What the order reads of a request; the same only as itself."""

    num_prompt_tokens = 0

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Upstream(RuleBasedStateMachine):
    """A scheduler that admits, decodes, finishes and preempts at random."""

    def __init__(self):
        super().__init__()
        # What is known to have changed must do without it.
        self.no_audit = patch("meridian_patch.engine.scheduler.running_order.AUDITED_PER_STEP", 0)
        self.no_audit.start()
        self.tracker = SpokenTracker(BOUNDARIES, PROTECTED)
        self.policy = LatencyPolicy(PROTECTED, levels=Levels(10**9, 0.0))
        self.order = RunningOrder(self.policy, self.tracker, time_budget_us=10**9)
        self.running = []
        self.waiting = []
        # The stock order: as admitted.
        self.admitted = []
        self.born = 0

    def teardown(self):
        self.no_audit.stop()

    @rule(thinks=st.booleans(), computed=st.integers(0, 50), prefilling=st.booleans())
    def admit(self, thinks, computed, prefilling):
        self.born += 1
        one = Request(request_id=f"r{self.born}", priority=self.born % 3)
        self.tracker.add(one.request_id, [START if thinks else WORD])
        self._admit(one, computed, prefilling)

    @precondition(lambda self: self.waiting)
    @rule(place=PLACE, computed=st.integers(0, 50), prefilling=st.booleans())
    def resume(self, place, computed, prefilling):
        self._admit(self.waiting.pop(place % len(self.waiting)), computed, prefilling)

    @precondition(lambda self: self.running)
    @rule(token=st.sampled_from([WORD, WORD, START, END]), place=PLACE)
    def decode(self, token, place):
        """Everybody gets a word, and one gets another token."""
        chosen = place % len(self.running)
        for index, one in enumerate(self.running):
            one.num_computed_tokens += 1
            one.is_prefill_chunk = False
            if self.tracker.say(one.request_id, [token if index == chosen else WORD]):
                self.order.changed(one)

    @precondition(lambda self: self.running)
    @rule(places=st.lists(PLACE, max_size=3), is_new_list=st.booleans(), is_told=st.booleans())
    def finish(self, places, is_new_list, is_told):
        """Some end; ``is_told`` is False when no hook is called for it."""
        done = {self.running[place % len(self.running)] for place in places}
        if is_new_list:
            self.running = [one for one in self.running if one not in done]
        else:
            for one in done:
                self.running.remove(one)
        for one in done:
            self._gone(one, is_told=is_told)
            self.tracker.remove(one.request_id)

    @precondition(lambda self: self.running)
    @rule(place=PLACE, is_last=st.booleans(), is_told=st.booleans())
    def preempt(self, place, is_last, is_told):
        one = self.running.pop(-1 if is_last else place % len(self.running))
        self._gone(one, is_told=is_told)
        self.waiting.append(one)
        if not is_told:
            # One that was not reported is missed only when a step is arranged without it.
            self.arrange()

    @rule()
    def arrange(self):
        before = list(self.running)
        self.running, is_in_time = self.order.arrange(self.running)
        assert is_in_time
        # No request is lost and none comes twice.
        assert len(self.running) == len(before)
        assert set(self.running) == set(before)
        assert self.running == sorted(
            self.admitted, key=lambda one: self.policy.rank(self._view(one))
        )

    @invariant()
    def the_order_knows_no_more_than_what_runs_or_ran(self):
        assert len(self.order._order) == len(self.order._keys) == len(self.order._key_of)
        assert self.order._keys == sorted(self.order._keys)
        assert set(self.order._changed) <= set(self.order._key_of)
        assert set(self.order._prefilling) <= set(self.order._key_of)

    def _admit(self, one, computed, prefilling):
        one.num_computed_tokens, one.is_prefill_chunk = computed, prefilling
        self.running.append(one)
        self.admitted.append(one)

    def _gone(self, one, *, is_told):
        self.admitted.remove(one)
        if is_told:
            self.order.forget(one)

    def _view(self, one):
        state = self.tracker.get(one.request_id)
        return RequestView(
            state.phase,
            state.tokens_in_phase,
            state.is_handed_off,
            one.is_prefill_chunk,
            state.think_tokens,
            one.num_prompt_tokens,
            one.priority,
        )


SETTINGS = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestUpstream = Upstream.TestCase
TestUpstream.settings = SETTINGS
