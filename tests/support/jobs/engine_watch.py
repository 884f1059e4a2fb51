"""Watches the scheduler of an in-process engine from outside: what it ran, whom it preempted.

It wraps methods of the one scheduler object, so it sees stock and patched schedulers alike and
owes nothing to the product's own counters.
"""

from dataclasses import dataclass, field

PREFILL, THINK, ANSWER = "prefill", "think", "answer"
# The class of the product's own requests, which no user sent.
PROBE = "ProbeRequest"
# The attribute by which the product asks for measuring in a step.
PLAN = "meridian_plan"


@dataclass
class Watched:
    """What one run did; times are in scheduler steps, counted from 1 in each run.

    Attributes:
        preemptions: one entry per preemption: request name, phase, step.
        probed_preemptions: those of requests of which a probe was due or under way.
        first_step: request name -> first step in which it ran.
        prefill_steps: request name -> steps in which it computed prompt tokens.
        max_step_tokens: the largest number of tokens scheduled in one step.
        drafted: speculative tokens scheduled.
        accepted: tokens produced beyond one per request and step.
        routed: request name -> the phases that the product's tracker put it in, in order; empty
            on a stock scheduler.
        passed_over: steps that the product neither planned nor ordered.
        planned: steps in which something was to be measured.
        probes: tokens computed by each probe, in each step it was part of.
        encoded: images that the encoder was run for, by request; those of probes under ``PROBE``.
        misrouted: times the tracker disagreed with the phase read off the request's tokens.
    """

    steps: int = 0
    preemptions: list[dict] = field(default_factory=list)
    probed_preemptions: int = 0
    first_step: dict[str, int] = field(default_factory=dict)
    prefill_steps: dict[str, int] = field(default_factory=dict)
    max_step_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    routed: dict[str, list[str]] = field(default_factory=dict)
    misrouted: int = 0
    passed_over: int = 0
    planned: int = 0
    probes: list[int] = field(default_factory=list)
    encoded: dict[str, int] = field(default_factory=dict)


def request_name(request_id: str) -> str:
    """The name a request was added under; vLLM appends a random suffix."""
    return request_id.rsplit("-", 1)[0]


class SchedulerWatch:
    """Records into ``self.seen``; ``restart`` begins a new record."""

    def __init__(self, scheduler, start_id: int, end_id: int) -> None:
        self.seen = Watched()
        self.scheduler = scheduler
        self._start_id, self._end_id = start_id, end_id
        self._wrap("schedule", after=self._scheduled)
        self._wrap("update_from_output", after=self._updated)
        self._wrap("_preempt_request", before=self._preempting)
        if hasattr(scheduler, "policy_parts"):
            self._wrap("is_uncontended", after=self._judged, owner=scheduler.policy_parts.first)

    def restart(self) -> Watched:
        self.seen = Watched()
        return self.seen

    def has(self, what: str) -> bool:
        """Whether something is there at this moment: ``probe``, one that runs or waits."""
        assert what == "probe", what
        return any(type(r).__name__ == PROBE for r in self.scheduler.requests.values())

    def _wrap(self, name: str, before=None, after=None, owner=None) -> None:
        owner = owner or self.scheduler
        inner = getattr(owner, name)

        def wrapper(*args, **kwargs):
            if before is not None:
                before(*args)
            result = inner(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        setattr(owner, name, wrapper)

    def _scheduled(self, output) -> None:
        seen = self.seen
        seen.steps += 1
        seen.max_step_tokens = max(seen.max_step_tokens, output.total_num_scheduled_tokens)
        seen.planned += hasattr(output, PLAN)
        seen.drafted += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            name = request_name(request_id)
            request = self.scheduler.requests[request_id]
            is_probe = type(request).__name__ == PROBE
            images = len(output.scheduled_encoder_inputs.get(request_id, ()))
            if images:
                whose = PROBE if is_probe else name
                seen.encoded[whose] = seen.encoded.get(whose, 0) + images
            if is_probe:
                seen.probes.append(scheduled)
                continue
            seen.first_step.setdefault(name, seen.steps)
            if request.num_computed_tokens - scheduled < request.num_prompt_tokens:
                seen.prefill_steps[name] = seen.prefill_steps.get(name, 0) + 1

    def _updated(self, outputs) -> None:
        for client in outputs.values():
            for output in client.outputs:
                self.seen.accepted += max(0, len(output.new_token_ids) - 1)
        tracker = getattr(self.scheduler, "phase_tracker", None)
        if tracker is not None:
            for request_id, request in self.scheduler.requests.items():
                # One that has ended stays while a connector sends its blocks.
                if type(request).__name__ == PROBE or request.is_finished():
                    continue
                self._routed(request_id, str(tracker.get(request_id).phase), self._phase(request))

    def _routed(self, request_id: str, routed: str, expected: str) -> None:
        phases = self.seen.routed.setdefault(request_name(request_id), [])
        if phases[-1:] != [routed]:
            phases.append(routed)
        self.seen.misrouted += routed != expected

    def _preempting(self, request, *_) -> None:
        if type(request).__name__ == PROBE:
            return
        self.seen.probed_preemptions += self._is_probed(request.request_id)
        self.seen.preemptions.append(
            {
                "name": request_name(request.request_id),
                "phase": self._phase(request),
                "step": self.seen.steps + 1,
            }
        )

    def _judged(self, is_uncontended: bool) -> None:
        self.seen.passed_over += is_uncontended

    def _is_probed(self, request_id: str) -> bool:
        exits = getattr(self.scheduler, "early_exit", None)
        if exits is None or exits.probes is None:
            return False
        watched = exits.requests.get(request_id)
        is_live = watched is not None and watched.probe_id is not None
        return is_live or request_id in exits.probes.due

    def _phase(self, request) -> str:
        if request.num_output_tokens == 0:
            return PREFILL
        for token in reversed(list(request.all_token_ids)):
            if token == self._end_id:
                return ANSWER
            if token == self._start_id:
                return THINK
        return ANSWER


def left_behind(scheduler) -> dict:
    """What a scheduler still holds when all requests have ended."""
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests_left": len(scheduler.requests),
        # One block is vLLM's null block and never free.
        "blocks_left": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        # Of an encoder-decoder model there is no such list.
        "encoded_left": len(getattr(scheduler.encoder_cache_manager, "request_cached_ids", ())),
        **(_of_product(scheduler) if hasattr(scheduler, "phase_tracker") else {}),
    }


def totals(scheduler) -> dict[str, int]:
    """The product's counters; none on a stock scheduler."""
    return dict(scheduler.phase_counters.totals) if hasattr(scheduler, "phase_counters") else {}


def _of_product(scheduler) -> dict:
    """What our scheduler and cache manager say of themselves."""
    from meridian_patch.engine.kv_cache.free_queue import TieredFreeQueue
    from meridian_patch.engine.kv_cache.integrity import find_faults

    pool = scheduler.kv_cache_manager.block_pool
    is_tiered = isinstance(pool.free_block_queue, TieredFreeQueue)
    return {
        "routed_left": len(scheduler.phase_tracker),
        **(_of_exits(scheduler.early_exit) if scheduler.early_exit else {}),
        **({"kv_faults": find_faults(pool)} if is_tiered else {}),
    }


def _of_exits(exits) -> dict:
    return {
        "watched_left": len(exits.requests) + len(exits.forced_closes),
        "probes_left": len(exits.probes or ()),
        # What waits to be told with a step that never comes.
        "told_left": len(exits.reports.drain()),
    }
