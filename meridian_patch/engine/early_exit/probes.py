"""Probes: internal requests that measure how certain a thought's answer is.

A probe's prompt is its parent's tokens so far and a trial boundary. The entropy of the one token
that it samples is EAT (arXiv:2509.26522). It shares its parent's blocks but for the last one (the
last two with EAGLE drafts). Its output never leaves the engine.
"""

import math
from itertools import count
from typing import Any, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.watched_request import WatchedRequest
from meridian_patch.engine.kv_cache.shared_blocks import held_tokens, tokens_behind_hits
from meridian_patch.engine.probe_request import ProbeRequest, sampled_as
from meridian_patch.engine.scheduler.admission_checks import first_ready, num_seated
from meridian_patch.engine.scheduler.running_order import ArrivalOrder
from meridian_patch.exit.actions import Probe
from meridian_patch.phase.boundaries import TokenIds

# One seat is kept for probes per so many requests that may run.
_SEATS_PER_PROBE = 16
# Two arrivals apart.
_MOMENT_S = 1e-6


class Due(NamedTuple):
    """A probe that is to be made, or was.

    Attributes:
        watched: the request whose thought it probes.
        probe: its place in the thought.
        prefix_tokens: tokens of the request before the trial boundary, prompt included.
    """

    watched: WatchedRequest
    probe: Probe
    prefix_tokens: int

    @property
    def parent(self) -> Any:
        """The request whose thought it probes."""
        return self.watched.request


class ProbeLimits(NamedTuple):
    """Limits of the number of probes.

    Attributes:
        in_flight: live probes at a time.
        every_steps: steps between two steps with probes.
        context_tokens: sum of the tokens before the trial boundary, over all probes added to one
            step; a single probe may exceed it.
    """

    in_flight: int
    every_steps: int
    context_tokens: int


class Probes:
    """The probes that are due and those that are live (offered or running).

    1. A probe goes ahead of the waiting requests and behind all running ones. None is offered while
       a preempted answer waits. Due probes are offered together, and not in every step, up to a
       summed context, because the CPU time of a probe grows with its context. Those for which the
       step has no tokens or seats left follow in the next steps. A probe that is not scheduled in
       the step leaves the queue and is due again.
    2. It computes at most a block and the trial boundary: without its parent's blocks in the cache
       it is not made. It is offered only if the step has that many tokens left, because a probe
       that does not fit would block the queue.
    3. It is made only if it fits into ``max_model_len`` with the token that it samples.
    4. A parent has at most one live probe and one due probe. A newer due probe replaces the older.
    5. A probe that is preempted while its sample is in flight is waited for; any other is dropped.
       A reset of the cache makes live probes due again.
    6. The probes of a thought end with it.
    7. Its parent's images are in its parent's blocks. A probe is not made if its own tokens reach
       back into an image, because the encoder might have to run again.
    8. It uses its parent's sampling parameters, so that it does not change the sampler's code path
       for the whole batch.

    Args:
        scheduler: the phase-aware scheduler.
        suffix: tokens of the trial boundary.
        limits: how many probes at a time.

    Attributes:
        due: probes that wait for a step, by the parent's id, the longest due first.
        live: probes that are offered or running, by their own ids.
        num_probes: number of probes that ended.
        most_computed_tokens: the most tokens that one computed in a step.
    """

    def __init__(self, scheduler: Any, suffix: TokenIds, limits: ProbeLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self.seats = ProbeSeats(scheduler)
        # Number of steps without probes before the next one with probes.
        self._pause_steps = 0
        # Whether the next step has too few tokens or seats for all due probes.
        self._is_short = False
        self._missing_tokens = 0
        self._suffix = list(suffix)
        self._block_size = scheduler.block_size
        self._max_model_len = scheduler.vllm_config.model_config.max_model_len
        # Load-bearing: a running request gets no more tokens in a step than this; 0: no bound.
        settings = scheduler.vllm_config.scheduler_config
        self._chunk_tokens = settings.long_prefill_token_threshold or math.inf
        [group] = scheduler.kv_cache_config.kv_cache_groups
        # Load-bearing: with full attention a running request holds all of its blocks.
        self._holds_all = isinstance(group.kv_cache_spec, FullAttentionSpec)
        self._names = (f"{wire.PROBE}-{number}" for number in count())
        self.due: dict[str, Due] = {}
        self.live: dict[str, Due] = {}
        self.num_probes = 0
        self.most_computed_tokens = 0

    def __len__(self) -> int:
        return len(self.due) + len(self.live)

    @property
    def are_next(self) -> bool:
        """Whether the next step may have probes."""
        places = min(self._num_allowed(), free_seats(self._scheduler))
        return bool(self.due) and not self._pause_steps and places > 0

    @property
    def suffix_tokens(self) -> int:
        """Number of tokens that a probe has behind its parent's."""
        return len(self._suffix)

    def subtract_from(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Numbers of running and of waiting requests without the probes among them.

        A preempted probe is in the queue only until ``settle`` is called. It may stay live for
        more steps, in no queue, while its sample is in flight; then it is not subtracted.
        """
        if not self.live:
            return counts
        # Load-bearing: upstream counts the members of its two queues regardless of their status.
        running = waiting = 0
        for name in self.live:
            request = self._scheduler.requests.get(name)
            status = None if request is None else request.status
            running += status == RequestStatus.RUNNING
            is_preempted = status == RequestStatus.PREEMPTED and not request.is_awaited
            waiting += status == RequestStatus.WAITING or is_preempted
        return counts[0] - running, counts[1] - waiting

    def kept_seats(self, all_seats: int) -> int:
        """Number of seats to keep for probes, of ``all_seats``."""
        return min(self._limits.in_flight, all_seats // _SEATS_PER_PROBE)

    def share_seats(self, *, is_kept: bool) -> None:
        """Compute which free seats probes may take; call once per step, before ``offer``.

        Args:
            is_kept: whether to keep seats for probes while a request waits for one.
        """
        kept = self.kept_seats(self._scheduler.max_num_active_reqs) if is_kept else 0
        self.seats.share(kept, len(self.live), self._limits.in_flight)

    def ask(self, watched: WatchedRequest, probe: Probe, prefix_tokens: int) -> None:
        """Make a probe due after a request's first ``prefix_tokens`` tokens, if it is possible."""
        parent = watched.request
        # Load-bearing: for a token sampled beyond the maximal length, model runner V1 raises, and
        # V2 writes it into memory of the next request.
        if prefix_tokens + len(self._suffix) + 1 > self._max_model_len:
            return
        full = self._num_cached(prefix_tokens)
        # Prompt embeddings are not passed to the probe.
        is_possible = parent.prompt_embeds is None or parent.num_prompt_tokens <= full
        # Load-bearing: upstream reports every request with media to an encoder connector.
        is_possible &= self._scheduler.ec_connector is None or not parent.mm_features
        if is_possible and all(_is_behind(image, full) for image in parent.mm_features):
            self.due[parent.request_id] = Due(watched, probe, prefix_tokens)

    def cancel_all(self) -> None:
        """Drop all due probes and abort all live ones."""
        self.due.clear()
        for name in list(self.live):
            self._abort(name)

    def forget_all(self) -> None:
        """Forget all probes, whether they ended or not."""
        self.due.clear()
        self.live.clear()

    def cancel(self, watched: WatchedRequest) -> None:
        """Drop and abort the probes of a request whose thought ended."""
        self.due.pop(watched.name, None)
        if watched.probe_id is not None:
            self._abort(watched.probe_id)

    def recall(self) -> None:
        """Abort live probes and make them due again: the cache is to be reset, or all is paused."""
        for name, due in list(self.live.items()):
            self._abort(name)
            self.due.setdefault(due.parent.request_id, due)

    def rest(self) -> None:
        """Recall live probes while the scheduler computes nothing; call before each step."""
        # Load-bearing: with a connector, upstream takes requests that it does not count, as probes,
        # for ended ones that still hold blocks. It waits for these before such a pause is complete.
        if self.live and self._scheduler._pause_state is PauseState.PAUSED_ALL:
            self.recall()

    def offer(
        self, token_budget: int | None = None, arrivals: ArrivalOrder | None = None, most: int = 0
    ) -> int | None:
        """Put due probes at the front of the waiting queue; call before a step is scheduled.

        Args:
            token_budget: the step's budget if it is lower than the engine's; else None.
            arrivals: holds the true arrival times of running requests where others stand in for
                them during the step.
            most: to which that budget may be raised.

        Returns:
            The budget, with room for one probe: of large blocks each probe computes much again.
        """
        self._is_short, self._missing_tokens = False, 0
        if not self.are_next or self._scheduler._pause_state is not PauseState.UNPAUSED:
            return token_budget
        waiting = self._scheduler.waiting
        # Before those of its priority that wait, under a policy by priority and arrival.
        front_s = waiting.peek_request().arrival_time - _MOMENT_S if waiting else math.inf
        for due in self._choose(token_budget, most):
            name = next(self._names)
            parent = due.parent
            own_s = arrivals.true_s(parent) if arrivals else parent.arrival_time
            request = self._make(name, due, min(own_s, front_s))
            del self.due[due.parent.request_id]
            if not self._is_in_cache(request, due):
                self._missing_tokens = 0
                continue
            self.live[name] = due
            due.watched.probe_id = name
            self._scheduler.requests[name] = request
            self._scheduler.waiting.prepend_request(request)
        return token_budget and token_budget + self._missing_tokens

    def settle(self, output: Any) -> None:
        """Update the probes after a step was scheduled.

        A probe that the step did not admit leaves the queue and is due again. A preempted probe is
        aborted, unless its sample is still on the way. A step that computes a probe, or does not
        admit one, starts a pause of ``every_steps`` - 1 steps; any other step with tokens shortens
        the pause by one. There is no pause while the step had too few tokens or seats for all
        that are due: with a budget that the policy lowers, a step in ``every_steps`` would not keep
        up. There is one where the limit of live probes kept some out, or the budget was raised.
        """
        if output.total_num_scheduled_tokens:
            self._pause_steps = max(self._pause_steps - 1, 0)
        requests, preempted = self._scheduler.requests, []
        for name in list(self.live):
            request = requests.get(name)
            if request is None:
                self._forget(name)
            elif request.status == RequestStatus.WAITING:
                self._take_back(request)
                # What kept it out, as a request of higher priority, may keep it out for long.
                self._pause_steps = self._limits.every_steps - 1
            elif request.status == RequestStatus.PREEMPTED and not request.is_awaited:
                preempted.append(request)
        for request in preempted:
            self._give_up(request)
        for name in self.live:
            computed = output.num_scheduled_tokens.get(name, 0)
            if computed and not self._is_short:
                self._pause_steps = self._limits.every_steps - 1
            self.most_computed_tokens = max(self.most_computed_tokens, computed)

    def freed(self, request_id: str) -> Due:
        """Count and forget a probe that ended; returns its parent and position."""
        self.num_probes += 1
        return self._forget(request_id)

    def _take_back(self, request: ProbeRequest) -> None:
        """Make a probe that was not scheduled due again."""
        scheduler = self._scheduler
        del scheduler.requests[request.request_id]
        self._take_out(request)
        # Load-bearing: requests that were passed over in the queue are kept for the next step.
        scheduler.deferred_waiting.discard(request)
        due = self._forget(request.request_id)
        self.due.setdefault(due.parent.request_id, due)

    def _give_up(self, request: ProbeRequest) -> None:
        """End a preempted probe, unless its sample is still in flight."""
        # Load-bearing: upstream still delivers tokens that were in flight at a preemption, unless
        # the request is marked to drop them.
        is_sampled = request.num_stale_output_tokens and not request.is_prefill_chunk
        if is_sampled and not request.drop_stale_output:
            request.is_awaited = True
            self._take_out(request)
        else:
            self._abort(request.request_id)

    def _take_out(self, request: ProbeRequest) -> None:
        """Take a probe out of the queue, usually from its front."""
        waiting = self._scheduler.waiting
        # Load-bearing: a priority queue is a heap; removal from its middle rebuilds it.
        if waiting.peek_request() is request:
            waiting.pop_request()
        else:
            waiting.remove_request(request)

    def _forget(self, name: str) -> Due:
        due = self.live.pop(name)
        due.watched.probe_id = None
        return due

    def _abort(self, name: str) -> None:
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _choose(self, token_budget: int | None, most_budget: int) -> list[Due]:
        """The due probes that the next step has room for, the longest due first."""
        chosen: list[Due] = []
        most, seats = self._num_allowed(), min(free_seats(self._scheduler), self.seats.places)
        tokens_left = self._num_tokens_left(token_budget)
        most_tokens = self._num_tokens_left(most_budget) if most_budget else 0
        context_left = self._limits.context_tokens
        blocks_left, manager = self._num_blocks_left(), self._scheduler.kv_cache_manager
        for due in self.due.values():
            if not self._is_ready(due):
                continue
            if len(chosen) >= most or self._missing_tokens:
                # The limit, or the last one had the tokens; others are due in the next such step.
                break
            cached = self._num_cached(due.prefix_tokens)
            # Load-bearing: upstream pads a single token to a decode with drafts.
            least = 1 + self._scheduler.num_spec_tokens
            own_tokens = max(due.prefix_tokens - cached + len(self._suffix), least)
            # If a prefix is cached twice, the look-up may find the copy that no request holds.
            unheld = 0
            if self._holds_all:
                unheld = cached - held_tokens(manager, due.parent, cached + 1)
            # Load-bearing: upstream also asks for the slots of the drafts that follow.
            slots = unheld + own_tokens + self._scheduler.num_lookahead_tokens
            blocks = -(-slots // self._block_size)
            if unheld and blocks > blocks_left:
                continue
            missing = own_tokens - tokens_left if not chosen and own_tokens <= most_tokens else 0
            tokens_left += max(missing, 0)
            tokens_left -= own_tokens
            blocks_left -= blocks
            context_left -= due.prefix_tokens
            self._is_short = tokens_left < 0 or len(chosen) >= seats
            if self._is_short or blocks_left < 0 or (chosen and context_left < 0):
                break
            self._missing_tokens = max(missing, 0)
            chosen.append(due)
        return chosen

    def _is_ready(self, due: Due) -> bool:
        parent = due.parent
        # Load-bearing: a block is in the cache once its tokens are computed and known, and stays
        # there while a running request holds it.
        computed = parent.num_computed_tokens - parent.num_output_placeholders
        return (
            parent.status == RequestStatus.RUNNING
            and computed >= self._num_cached(due.prefix_tokens)
            and due.watched.probe_id is None
        )

    def _is_in_cache(self, request: ProbeRequest, due: Due) -> bool:
        """Whether the parent's blocks are cached; blocks outside of a window are freed."""
        if self._holds_all:
            return True
        manager = self._scheduler.kv_cache_manager
        return bool(manager.get_computed_blocks(request)[1] >= self._num_cached(due.prefix_tokens))

    def _make(self, name: str, due: Due, arrival_s: float) -> ProbeRequest:
        parent = due.parent
        token_ids = parent._all_token_ids[: due.prefix_tokens]
        token_ids += self._suffix
        request = ProbeRequest(
            request_id=name,
            prompt_token_ids=token_ids,
            sampling_params=sampled_as(parent.sampling_params, len(token_ids)),
            pooling_params=None,
            client_index=parent.client_index,
            arrival_time=arrival_s,
            mm_features=parent.mm_features,
            lora_request=parent.lora_request,
            cache_salt=parent.cache_salt,
            priority=parent.priority,
        )
        # The parent's hashes are reused, because hashing a long thought takes milliseconds.
        # Load-bearing: a hasher continues after the hashes that exist.
        request._block_hasher = parent._block_hasher
        per_hash = self._scheduler.kv_cache_manager.block_pool.hash_block_size
        request.block_hashes = parent.block_hashes[: due.prefix_tokens // per_hash]
        request.update_block_hashes()
        return request

    def _num_allowed(self) -> int:
        """Number of new probes that the limit of live ones allows."""
        return self._limits.in_flight - len(self.live)

    def _num_blocks_left(self) -> int:
        """Upper bound of the KV blocks that the next step's probes may take."""
        manager = self._scheduler.kv_cache_manager
        # Load-bearing: an admission must leave this many blocks free.
        kept = manager.watermark_blocks if self._scheduler.running else 0
        return int(manager.block_pool.get_num_free_blocks() - kept)

    def _num_tokens_left(self, token_budget: int | None) -> int:
        """Tokens of the next step that running requests do not take."""
        scheduler = self._scheduler
        most = scheduler.max_num_scheduled_tokens
        budget = most if token_budget is None else min(most, token_budget)
        # Load-bearing: the upper bound of tokens that upstream schedules of a running request.
        wanted = (
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens
            for request in scheduler.running
        )
        return int(budget - sum(min(max(tokens, 0), self._chunk_tokens) for tokens in wanted))

    def _num_cached(self, prefix_tokens: int) -> int:
        """Tokens of a prefix that a probe finds in the cache."""
        before = max(prefix_tokens - tokens_behind_hits(self._scheduler), 0)
        return before // self._block_size * self._block_size


class ProbeSeats:
    """Computes how many of the free seats a step's probes may take.

    A probe holds a seat for one or two steps, a request for as long as it runs. If no waiting
    request could use a seat, probes may take all free ones. Otherwise:

    1. If seats are kept for probes, probes take only these. They are kept because in a full batch
       without probes an endless thought would not be closed and would keep its seat.
    2. If none are kept and several are free, probes leave one free.
    3. If none are kept and one is free, probes and requests take it in turn, so a waiting request
       is passed over at most once.

    A request that waits for KV blocks cannot use a seat, so probes continue beside it.

    Attributes:
        places: seats that probes may take in the next step.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        # Whether probes had the last turn, and whether a request wanted a seat.
        self._had_turn = False
        self._is_wanted = False
        self.places = 0

    def share(self, num_kept: int, num_probes: int, most_probes: int) -> None:
        """Update ``places``; call once per step, before probes are offered to it.

        Args:
            num_kept: seats to keep for probes.
            num_probes: number of live probes.
            most_probes: upper bound of live probes.
        """
        scheduler = self._scheduler
        free = free_seats(scheduler)
        self.places = free
        if not 0 < free + num_probes <= num_kept + most_probes or not scheduler.waiting:
            self._is_wanted = False
            return
        if free:
            # If probes hold the last seats this cannot be checked, and the last result is kept.
            self._is_wanted = first_ready(scheduler) is not None
        if not self._is_wanted:
            return
        if num_kept:
            if free + num_probes > num_kept:
                self.places = max(num_kept - num_probes, 0)
        elif free > 1:
            self.places = free - 1
        elif free:
            self.places = 0 if self._had_turn else 1
            self._had_turn = not self._had_turn


def free_seats(scheduler: Any) -> int:
    """Number of requests that upstream would still admit; call outside of ``schedule()``."""
    # Load-bearing: upstream admits requests up to this number, paused sessions included. The model
    # runner may have more slots (max_num_seqs).
    return int(scheduler.max_num_active_reqs - num_seated(scheduler))


def _is_behind(image: Any, num_tokens: int) -> bool:
    """Whether the image ends within the first ``num_tokens`` tokens and need not be read again."""
    # Load-bearing: for every new request the workers read its images from memory that they share
    # with the API server. The API server does not count probes as readers, and reuses the memory
    # for another image. A worker that reads the wrong image raises, and the engine ends.
    is_shared = image.data is not None and "address" in image.data
    return not is_shared and image.mm_position.offset + image.mm_position.length <= num_tokens
