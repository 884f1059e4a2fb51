"""One record per request: what the plug-in keeps of it in the engine core, and where it is dropped.

A part keeps nothing of a request in a container of its own. What it has to note is a field here,
and where it has to find some requests without looking at all, they are in one of the ordered sets.
So a request that leaves the scheduler is forgotten in one place, whatever parts there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meridian_patch.config.family_schema import History
from meridian_patch.config.request_options import NO_OPTIONS, RequestOptions

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from meridian_patch.engine.handoff.lora_weights import Loaded
    from meridian_patch.engine.handoff.think_part import Move

Arrival = tuple[float, int]
"""When a request arrived, moved by its priority, and its number: several may arrive at once."""

NOT_PLACED: Final[Arrival] = (0.0, 0)
"""Of a request that has not been placed in the queue."""

Place = tuple[int, Arrival]
"""Level and arrival, by which the queue of waiting requests is sorted."""

FRONT: Final[Place] = (-1, (0.0, 0))
"""Where upstream puts a request that it preempts, and the policy those that go before all."""


@dataclass(slots=True, eq=False)
class RequestState:
    """What is known of one request, besides what vLLM keeps on it and the tracker of its phase.

    Attributes:
        request: vLLM's.
        options: its ``meridian_*`` fields; of a session, those of its last chunk.
        own_priority: the priority that ``meridian_priority`` replaced; None: it replaced none.
        lost_tokens: tokens that were computed when it was preempted last, until it resumes; None:
            it was not preempted, or has resumed.
        known_tokens: its think tokens that the levels have learnt.
        ended_tokens: its think tokens when a thought of its ended last.
        arrival: when it arrived, moved by its priority, and its number.
        place: where it stands in the queue, or stood last.
        overtaken_s: when it arrived, for a new one that later ones may overtake.
        away_s: when it was preempted last; of those in ``RequestStates.away``.
        safe_tokens: think tokens before which it makes room for no other request.
        room_made: its number of preemptions when others made room for it last, and how often they
            did since it was preempted so often.
        history: the rule for its blocks in the KV tiers, where more is known than the family's.
        is_offered: whether it may be handed off once its thought has ended.
        adapter: the files of its LoRA adapter, as it began with them; only if it is offered.
        move: its hand-off, from the end of its thought to its last token.
    """

    request: "Request"
    options: RequestOptions = NO_OPTIONS
    own_priority: int | None = None
    lost_tokens: int | None = None
    known_tokens: int = 0
    ended_tokens: int = 0
    arrival: Arrival = NOT_PLACED
    place: Place = FRONT
    overtaken_s: float = 0.0
    away_s: float = 0.0
    safe_tokens: int = 0
    room_made: tuple[int, int] = (0, 0)
    history: History | None = None
    is_offered: bool = False
    adapter: "Loaded | None" = None
    move: "Move | None" = None


StateSet = dict[RequestState, None]
"""An ordered set, so that equal runs behave equally."""


class RequestStates:
    """The records of a scheduler's requests. Probes have none: no user waits for them.

    Attributes:
        in_turn: streaming sessions within a turn.
        waiting_answers: preempted answers that have not resumed yet.
        prefilling: those whose known tokens are being computed, as they were admitted. Some may be
            done, or may have been preempted since.
        answering: those in their answer phase whose reader waits for tokens.
        impatient: those among them that ask for a latency of their own. Few do, and only these are
            searched for the tightest one.
        whole_waiting: those that wait and whose prompt must be computed in one piece.
        whole_running: those among the prefilling ones; as there, some may be done.
        overtaken: new ones with long prompts, which later ones may overtake; the oldest first.
        away: preempted ones that wait, the one that was preempted first in front.
        to_place: preempted thinkers that still stand at the front, where upstream put them.
        to_move: preempted ones whose level may have changed while they wait.
        held: thinkers that are left out of a step, and make room after it.
    """

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self.in_turn: StateSet = {}
        self.waiting_answers: StateSet = {}
        self.prefilling: StateSet = {}
        self.answering: StateSet = {}
        self.impatient: StateSet = {}
        self.whole_waiting: StateSet = {}
        self.whole_running: StateSet = {}
        self.overtaken: StateSet = {}
        self.away: StateSet = {}
        self.to_place: StateSet = {}
        self.to_move: StateSet = {}
        self.held: StateSet = {}
        self._sets = [each for each in vars(self).values() if each is not self._states]

    def add(self, request: "Request") -> RequestState:
        """Make the record of a new request, once, before any part knows of it."""
        state = self._states[request.request_id] = RequestState(request)
        return state

    def drop(self, request: "Request") -> None:
        """Forget a request that left the scheduler, once, after all parts have known of it."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            for each in self._sets:
                each.pop(state, None)

    def of(self, request: "Request") -> RequestState:
        """The record of a request that is no probe."""
        return self._states[request.request_id]

    def get(self, request_id: str) -> RequestState | None:
        """The record of a request by its id; None for a probe."""
        return self._states.get(request_id)

    def begin(self, state: RequestState) -> None:
        """Note a request that a step begins or resumes: it waits no longer."""
        self.waiting_answers.pop(state, None)
        self.overtaken.pop(state, None)
        self.prefilling[state] = None
        if state in self.whole_waiting:
            del self.whole_waiting[state]
            self.whole_running[state] = None

    def end_turn(self, session: RequestState) -> None:
        """Note the end of a session's turn: its next thought and answer begin anew."""
        session.safe_tokens, session.room_made = 0, (0, 0)
        for each in (
            self.in_turn, self.waiting_answers, self.answering, self.impatient, self.overtaken,
            self.away, self.to_place, self.to_move,
        ):  # fmt: skip
            each.pop(session, None)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __len__(self) -> int:
        return len(self._states)
