"""Sets the retention of freed KV blocks by the phases of requests; counts hits and evictions."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from meridian_patch.config.family_schema import History
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import Config
from meridian_patch.engine import status
from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.engine.kv_cache.manager import PhaseKVCaching
from meridian_patch.engine.kv_cache.offloaded_thoughts import (
    OffloadedThoughts,
    build_offloaded_thoughts,
)
from meridian_patch.engine.kv_cache.shared_blocks import count_shared
from meridian_patch.engine.request_state import RequestStates
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.engine.scheduler.parts import SchedulerPart, StepPlan
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.thoughts import holds_any
from meridian_patch.phase.tracker import Phase, PhaseTracker, RequestPhase
from meridian_patch.policy.history_evidence import HistoryEvidence
from meridian_patch.policy.retention import (
    Retention,
    Tier,
    choose_history,
    retain_finished,
    retain_preempted,
    retain_skipped,
)
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

logger = init_logger("vllm.meridian_patch")

# Rules by which a prompt may hold less than the turn before it.
_DROPPING = ("strip", "keep_in_tool_loop")


class KVTiers(SchedulerPart):
    """The scheduler's part for KV tiers.

    Args:
        manager: the phase-aware cache manager; its ``phases`` is set to this object.
        tracker: phases of all requests.
        states: records of all requests.
        history: the history rule; ``keep`` makes every decision stock's, where requests have no
            rule of their own.
        tool_call: token sequences, any of which opens a tool call.
        check_interval_s: least seconds between two integrity checks.
        requests: the scheduler's requests by id.
        hash_block_tokens: tokens of a block as prefixes are hashed.
        is_on: False where every decision is stock's, whatever requests say.
        offloaded: what a tier outside the engine keeps; None: there is none, or not known.
    """

    name = counters.KV_TIERS

    def __init__(
        self,
        manager: PhaseKVCaching,
        tracker: PhaseTracker,
        states: RequestStates,
        history: History,
        tool_call: tuple[TokenIds, ...],
        guard: StepGuard,
        phase_counters: PhaseCounters,
        check_interval_s: float,
        requests: Mapping[str, "Request"],
        hash_block_tokens: int,
        offloaded: OffloadedThoughts | None = None,
        *,
        is_on: bool = True,
    ) -> None:
        self.history = history
        self._is_on = is_on
        self._hash_block_tokens = hash_block_tokens
        self._evidence = HistoryEvidence()
        self._states = states
        self._offloaded = offloaded
        self._manager = manager
        self._tracker = tracker
        self._tool_call = tool_call
        self._guard = guard
        self._counters = phase_counters
        self._check_interval_s = check_interval_s
        self._last_check_s = manager.clock()
        self._requests = requests
        self._is_off = False
        # Retention of finished requests whose blocks are not freed yet.
        self._finished: dict[str, Retention | None] = {}
        manager.phases = self

    def on_added(self, request: "Request", options: RequestOptions) -> None:
        if not self._is_on:
            return
        wish = options.meridian_history
        if wish is not None:
            sees = bool(self._tool_call)
            rule = choose_history(wish, "auto", sees_tool_calls=sees)
            self._states.of(request).history = rule
        elif self.history in _DROPPING:
            # Load-bearing: the hashes of the prompt's full blocks, from the start on.
            is_kept = self._evidence.of_prompt(request.block_hashes)
            if is_kept is not None:
                self._states.of(request).history = "keep" if is_kept else self.history

    def on_freed(self, request: "Request") -> None:
        # Its blocks are freed right after this or, with a connector, later.
        state = self._tracker.get(request.request_id)
        rule = self._rule_of(request.request_id)
        if state is not None:
            has_tool_call = self._has_tool_call(request, state)
            self._learn(request, state, has_tool_call=has_tool_call)
            retention = retain_finished(state, rule, has_tool_call=has_tool_call)
            self._finished[request.request_id] = retention
            if self._offloaded and retention and retention.tier is Tier.THINK_COMPLETE:
                self._offloaded.drop(request, retention.kept_tokens)

    def after_schedule(
        self, plan: StepPlan, output: "SchedulerOutput", started: Sequence[str]
    ) -> None:
        # Load-bearing: after the last request ended, upstream schedules one more step without
        # tokens, which tells the workers. So the check delays no request.
        if not self._requests:
            self.check()

    def before_stats(self) -> None:
        self.count_evictions()

    def on_switched_off(self) -> None:
        self._is_off = True
        self._is_on = False
        self.history = "keep"
        self._finished.clear()
        self._manager.phases = None
        self.end_free()

    def begin_free(self, request: "Request") -> None:
        """Apply the retention of a finished request, whose blocks are about to be freed."""
        if self._is_off:
            return
        with self._guard.protect(self.name, request.request_id):
            retention = self._finished.pop(request.request_id, None)
            self._manager.begin_free(request.request_id, retention)

    def begin_preemption(self, request: "Request") -> None:
        """Apply the retention of a preempted request, whose blocks are about to be freed."""
        if self._is_off:
            return
        with self._guard.protect(self.name, request.request_id):
            state = self._tracker.get(request.request_id)
            if state is not None:
                retention = retain_preempted(state, self._rule_of(request.request_id))
                self._manager.begin_free(request.request_id, retention)

    def end_free(self) -> None:
        """Stop applying the retention, because the blocks were freed."""
        self._manager.end_free()

    def skipped(self, request_id: str) -> Retention | None:
        """See ``Phases``."""
        # As `protect`, which takes longer: this is called for each request of each step.
        try:
            state = self._tracker.get(request_id)
            return None if state is None else retain_skipped(state, self._rule_of(request_id))
        except Exception as error:
            self._guard.failed(self.name, error, request_id)
            return None

    def admitted(self, request: "Request", num_hit_tokens: int) -> None:
        """Count hit tokens by the tier of their blocks, or as in use by other requests.

        With several cache groups, the first one is used.
        """
        with self._guard.protect(self.name, request.request_id):
            manager = self._manager.coordinator.single_type_managers[0]
            blocks = manager.req_to_blocks[request.request_id]
            in_use = min(count_shared(blocks) * manager.block_size, num_hit_tokens)
            state = self._tracker.get(request.request_id) if num_hit_tokens else None
            first_thought = state.first_thought if state else None
            kept, tier = num_hit_tokens, Tier.OUTPUT_CRITICAL
            if first_thought is not None and first_thought < num_hit_tokens:
                first_low = first_thought // manager.block_size
                kept = first_low * manager.block_size
                tier = self._manager.queues[0].tier_from(blocks[first_low])
            self._count_hit(counters.IN_USE, in_use)
            self._count_hit(Tier.OUTPUT_CRITICAL.label, kept - in_use)
            self._count_hit(tier.label, num_hit_tokens - max(kept, in_use))

    def count_evictions(self) -> None:
        """Count the cached blocks evicted since the last call, by tier."""
        for queue in self._manager.queues:
            for tier, number in queue.drain_evictions().items():
                self._counters.count(counters.EVICTION, tier.label, number)

    def check(self) -> None:
        """Check the free blocks, if the last check is at least ``check_interval_s`` ago.

        After a fault, every further decision is stock's.
        """
        now_s = self._manager.clock()
        if now_s - self._last_check_s < self._check_interval_s:
            return
        self._last_check_s = now_s
        faults = [fault for pool in self._manager.pools for fault in find_faults(pool)]
        if faults:
            self._counters.count(counters.FALLBACK, Fallback.KV_INTEGRITY)
            self._counters.count(counters.PART_OFF, counters.KV_TIERS)
            self.history = "keep"
            self._is_on = False
            # Reported once, because a fault does not go away.
            self._check_interval_s = math.inf
            logger.error(
                "meridian_patch: the free KV blocks are not in order, KV tiers are off from now "
                "on: %s",
                "; ".join(faults[:5]),
            )
            status.publish(kv_tiers="off", kv_tiers_off="free KV blocks were out of order, see log")

    def _rule_of(self, name: str) -> History:
        """What is known of a request's history: by itself, by other prompts, or by the family."""
        state = self._states.get(name) if self._is_on else None
        if state is not None and state.history is not None:
            return state.history
        is_kept = self._evidence.keeps and self.history in _DROPPING
        return "keep" if is_kept else self.history

    def _learn(self, request: "Request", state: RequestPhase, *, has_tool_call: bool) -> None:
        """Remember a turn whose thought the family's rule drops from the next prompt."""
        if not self._is_on or self.history not in _DROPPING:
            return
        dropped = retain_finished(state, self.history, has_tool_call=has_tool_call)
        if dropped is not None and dropped.tier is Tier.THINK_COMPLETE:
            num_kept = dropped.kept_tokens // self._hash_block_tokens
            self._evidence.finished(request.block_hashes, num_kept)

    def _has_tool_call(self, request: "Request", state: RequestPhase) -> bool:
        if not self._tool_call or state.phase is not Phase.ANSWER:
            return False
        # A tool-call marker that also ends thinking is the answer's first.
        begin = len(request._output_token_ids) - state.tokens_in_phase
        return holds_any(request._output_token_ids[max(begin, 0) :], self._tool_call)

    def _count_hit(self, label: str, num_tokens: int) -> None:
        if num_tokens > 0:
            self._counters.count(counters.HIT_TOKENS, label, num_tokens)


def build_kv_tiers(
    config: Config,
    boundaries: Boundaries | None,
    tracker: PhaseTracker,
    guard: StepGuard,
    phase_counters: PhaseCounters,
    scheduler: "PhaseScheduling",
) -> KVTiers | None:
    """Build the part that sets in which order freed KV blocks are evicted, by eviction tier.

    Returns:
        None where vLLM's own cache manager runs, prefix caching or the setting is off, or vLLM 0.32
        returns routed experts.
    """
    manager = scheduler.kv_cache_manager
    if not isinstance(manager, PhaseKVCaching):
        _tell_inactive(
            "the KV cache manager is vLLM's own, as always with --scheduler-cls. Activate "
            "meridian_patch before the engine is built to have them"
        )
        return None
    if not manager.queues:
        _tell_inactive(
            "prefix caching is off, so nothing in a free block can be hit. Leave out "
            "--no-enable-prefix-caching to have them"
        )
        return None
    # Load-bearing: vLLM 0.32 keeps the routed experts of cached blocks in a store that evicts in
    # the order in which stock frees the blocks. A request that hits a block takes its rows from
    # there, and where they are gone the worker raises and the engine ends. The store of vLLM 0.33
    # keeps what the KV cache has, and this method bounds each hit by it.
    if scheduler.aux_output_connector and not hasattr(
        scheduler.aux_output_connector, "max_cache_hit"
    ):
        _tell_inactive(
            "with --enable-return-routed-experts vLLM 0.32 has the routed experts of a cached "
            "block only for as long as stock keeps the block. Use vLLM 0.33, or leave the option "
            "out, to have them"
        )
        return None
    return KVTiers(
        manager,
        tracker,
        scheduler.request_states,
        _history_rule(config, boundaries),
        boundaries.tool_call if boundaries else (),
        guard,
        phase_counters,
        config.kv.check_interval_s,
        scheduler.requests,
        scheduler.hash_block_size,
        build_offloaded_thoughts(
            scheduler.connector, len(scheduler.kv_cache_config.kv_cache_groups)
        ),
        is_on=_is_on(config, boundaries),
    )


def _tell_inactive(why: str) -> None:
    logger.warning("meridian_patch: KV tiers are inactive: %s", why)
    status.publish(kv_tiers_off=why)


def _is_on(config: Config, boundaries: Boundaries | None) -> bool:
    return boundaries is not None and config.kv.tiers and config.policy.name != "noop"


def _history_rule(config: Config, boundaries: Boundaries | None) -> History:
    if boundaries is None or not _is_on(config, boundaries):
        return "keep"
    rule = choose_history(
        boundaries.history, config.kv.history, sees_tool_calls=bool(boundaries.tool_call)
    )
    if rule == "unverified":
        logger.warning(
            "meridian_patch: KV tiers keep outputs as stock does: it is not known what the chat "
            "template of family %s does with earlier turns' thinking. Set kv.history to strip, "
            "keep_in_tool_loop or keep, or history in a family file",
            boundaries.family,
        )
    elif rule == "keep" and "keep" not in {boundaries.history, config.kv.history}:
        logger.warning(
            "meridian_patch: KV tiers keep outputs as stock does: the history rule is "
            "keep_in_tool_loop, but family %s has no tool_call marker to see a tool loop by. Set "
            "tool_call in a family file, or kv.history to strip if there are no tools",
            boundaries.family,
        )
    return rule
