"""Probes: requests of our own that see how sure a thought's answer is, and never leave the engine.

A probe is its parent's tokens so far, and behind them a trial boundary; the entropy of the one
token that it would sample is EAT (arXiv:2509.26522). Its blocks are its parent's, but for the last
one (the last two where EAGLE drafts).
"""

import math
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from meridian_patch.engine.early_exit.probe_request import ProbeRequest
from meridian_patch.engine.early_exit.probe_seats import ProbeSeats, free_seats
from meridian_patch.engine.scheduler.admission_checks import held_tokens
from meridian_patch.exit.actions import Probe
from meridian_patch.phase.boundaries import TokenIds

# Requests that may run for each seat that is kept for probes.
_SEATS_PER_PROBE = 16


class _Due(NamedTuple):
    parent: Any
    probe: Probe
    # Tokens of the parent that stand before the trial boundary, its prompt's included.
    prefix_tokens: int


class ProbeLimits(NamedTuple):
    """How many probes the engine takes.

    Attributes:
        in_flight: probes under way at a time.
        every_steps: steps from one with probes to the next.
        context_tokens: tokens before the trial boundaries of all probes that are added to one
            step; a single probe may have more.
    """

    in_flight: int
    every_steps: int
    context_tokens: int


class Probes:
    """The probes that are due and those under way.

    1. A probe is offered to a step ahead of the waiting requests, behind all running ones, not
       while an answer waits, and not to every step: those that are due go together, up to a summed
       context, for a probe's CPU time grows with its context. One that gets no place in the step
       waits outside of the queue.
    2. It computes at most a block and the trial boundary: without its parent's blocks in the cache
       it is not made. It is offered when the step has that many tokens left for it: at the head of
       the queue a probe that does not fit would keep other requests from being admitted.
    3. It fits into ``max_model_len`` with the token that it samples, or it is not made.
    4. Of a parent, one probe is under way and one is due; a newer one takes the place of the due.
    5. One that is preempted while its sample is on the way is waited for; any other is dropped. A
       reset of the cache makes those under way due again.
    6. Whatever becomes of the parent, its probes end with its thought.
    7. What its parent sees is in its parent's blocks. Where its own tokens would reach back into an
       image, and the encoder might have to run again, it is not made.
    8. It is sampled as its parent is, so that it changes no sampler's path for the whole batch.

    Args:
        scheduler: the phase-aware scheduler.
        suffix: the trial boundary.
        limits: how many at a time.
    """

    def __init__(self, scheduler: Any, suffix: TokenIds, limits: ProbeLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self.seats = ProbeSeats(scheduler)
        # Steps to let pass before the next one with probes.
        self._pause_steps = 0
        self._suffix = list(suffix)
        self._block_size = scheduler.block_size
        self._max_model_len = scheduler.vllm_config.model_config.max_model_len
        # Load-bearing: a running request gets no more tokens in a step than this; 0: no bound.
        settings = scheduler.vllm_config.scheduler_config
        self._chunk_tokens = settings.long_prefill_token_threshold or math.inf
        [group] = scheduler.kv_cache_config.kv_cache_groups
        # Load-bearing: with full attention a running request holds all of its blocks.
        self._holds_all = isinstance(group.kv_cache_spec, FullAttentionSpec)
        self._names = (f"meridian-probe-{number}" for number in count())
        # By parent's id.
        self._due: dict[str, _Due] = {}
        # By the probe's own id; and the same by parent's.
        self._live: dict[str, _Due] = {}
        self._live_of: dict[str, str] = {}
        # Preempted since the last step was settled.
        self._displaced: list[str] = []
        # Tokens computed by all probes so far, and the most by one.
        self.num_probes = 0
        self.most_computed_tokens = 0

    def __len__(self) -> int:
        return len(self._due) + len(self._live)

    @property
    def are_next(self) -> bool:
        """Whether the next step may have some."""
        return bool(self._due) and not self._pause_steps and self._num_places() > 0

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the probes under way."""
        return tuple(self._live)

    def subtract_from(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Numbers of running and of waiting requests without the probes among them.

        A preempted probe is in the queue only until its step is settled. It may be live for more
        steps, in no queue, while its sample is on the way: such a one must not be subtracted.
        """
        if not self._live:
            return counts
        # Load-bearing: upstream counts the members of its two queues, whatever their statuses.
        running = waiting = 0
        for name in self._live:
            request = self._scheduler.requests.get(name)
            status = None if request is None else request.status
            running += status == RequestStatus.RUNNING
            is_displaced = status == RequestStatus.PREEMPTED and name in self._displaced
            waiting += status == RequestStatus.WAITING or is_displaced
        return counts[0] - running, counts[1] - waiting

    def kept_seats(self, all_seats: int) -> int:
        """Of the requests that may run at a time, how many seats to keep for probes."""
        return min(self._limits.in_flight, all_seats // _SEATS_PER_PROBE)

    def share_seats(self, *, is_kept: bool) -> None:
        """Once per step, before ``offer``: which free seats probes may take.

        Args:
            is_kept: whether seats are to be kept for probes where a request waits for one.
        """
        kept = self.kept_seats(self._scheduler.max_num_active_reqs) if is_kept else 0
        self.seats.share(kept, len(self._live), self._limits.in_flight)

    def ask(self, parent: Any, probe: Probe, prefix_tokens: int) -> None:
        """A probe is due behind the parent's first ``prefix_tokens`` tokens, if it may be made."""
        # Load-bearing: model runner V1 raises where a sampled token lies behind the maximal
        # length, and V2 writes it there, into what belongs to the next request.
        if prefix_tokens + len(self._suffix) + 1 > self._max_model_len:
            return
        full = self._num_cached(prefix_tokens)
        # Embeddings in place of a prompt's tokens are not handed on.
        is_told = parent.prompt_embeds is None or parent.num_prompt_tokens <= full
        # Load-bearing: upstream tells an encoder connector of every request with media.
        is_told &= self._scheduler.ec_connector is None or not parent.mm_features
        if is_told and all(_is_behind(image, full) for image in parent.mm_features):
            self._due[parent.request_id] = _Due(parent, probe, prefix_tokens)

    def cancel_all(self) -> None:
        """Every thought has ended."""
        self._due.clear()
        for name in list(self._live):
            self._abort(name)

    def cancel(self, parent_id: str) -> None:
        """The parent's thought has ended; unknown ids are fine."""
        self._due.pop(parent_id, None)
        name = self._live_of.get(parent_id)
        if name is not None:
            self._abort(name)

    def recall(self) -> None:
        """The KV cache is about to be reset: probes under way end, and are due again."""
        for name, due in list(self._live.items()):
            self._abort(name)
            self._due.setdefault(due.parent.request_id, due)

    def offer(self, token_budget: int | None = None) -> None:
        """Before a step is scheduled: put probes where it will find them.

        Args:
            token_budget: of the step, where it is lower than the engine's.
        """
        if not self.are_next or self._scheduler._pause_state is not PauseState.UNPAUSED:
            return
        for due in self._choose(token_budget):
            name = next(self._names)
            request = self._make(name, due)
            del self._due[due.parent.request_id]
            if not self._is_in_cache(request, due):
                continue
            self._live[name] = due
            self._live_of[due.parent.request_id] = name
            self._scheduler.requests[name] = request
            self._scheduler.waiting.prepend_request(request)

    def settle(self, output: Any) -> None:
        """After a step was scheduled: take back what found no place in it, or lost it."""
        if output.total_num_scheduled_tokens:
            self._pause_steps = max(self._pause_steps - 1, 0)
        displaced, self._displaced = self._displaced, []
        requests = self._scheduler.requests
        for name in list(self._live):
            request = requests.get(name)
            if request is None:
                self._forget(name)
            elif request.status == RequestStatus.WAITING:
                self._take_back(request)
        for name in displaced:
            request = requests.get(name)
            # It may have ended since, or run again.
            if request is not None and request.status == RequestStatus.PREEMPTED:
                self._give_up(request)
        for name in self._live:
            computed = output.num_scheduled_tokens.get(name, 0)
            if computed:
                self._pause_steps = self._limits.every_steps - 1
            self.most_computed_tokens = max(self.most_computed_tokens, computed)

    def displaced(self, request_id: str) -> None:
        """A probe was preempted."""
        self._displaced.append(request_id)

    def freed(self, request_id: str) -> _Due:
        """A probe is over; returns what it was for."""
        self.num_probes += 1
        return self._forget(request_id)

    def _take_back(self, request: ProbeRequest) -> None:
        """A probe found no place in the step."""
        scheduler = self._scheduler
        del scheduler.requests[request.request_id]
        self._take_out(request)
        # Load-bearing: requests that were passed over in the queue are kept for the next step.
        scheduler.deferred_waiting.discard(request)
        due = self._forget(request.request_id)
        self._due.setdefault(due.parent.request_id, due)

    def _give_up(self, request: ProbeRequest) -> None:
        """A probe was preempted; only what it sampled already is waited for."""
        # Load-bearing: what was on the way at a preemption is delivered all the same, unless it
        # is to be dropped.
        is_sampled = request.num_stale_output_tokens and not request.is_prefill_chunk
        if is_sampled and not request.drop_stale_output:
            self._take_out(request)
        else:
            self._abort(request.request_id)

    def _take_out(self, request: ProbeRequest) -> None:
        """Take a probe out of the queue, nearly always from its front."""
        waiting = self._scheduler.waiting
        # Load-bearing: a queue by priority is a heap; to take one out of its middle builds it anew.
        if waiting.peek_request() is request:
            waiting.pop_request()
        else:
            waiting.remove_request(request)

    def _forget(self, name: str) -> _Due:
        due = self._live.pop(name)
        del self._live_of[due.parent.request_id]
        return due

    def _abort(self, name: str) -> None:
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _choose(self, token_budget: int | None) -> list[_Due]:
        """Those that the next step has room for, the longest due first."""
        chosen: list[_Due] = []
        places = min(self._num_places(), self.seats.places)
        tokens_left = self._num_tokens_left(token_budget)
        context_left = self._limits.context_tokens
        blocks_left, manager = self._num_blocks_left(), self._scheduler.kv_cache_manager
        for due in self._due.values():
            if not self._is_ready(due):
                continue
            cached = self._num_cached(due.prefix_tokens)
            own_tokens = due.prefix_tokens - cached + len(self._suffix)
            # Of a prefix that is cached twice the look-up may find the one that no request holds.
            unheld = 0
            if self._holds_all:
                unheld = cached - held_tokens(manager, due.parent, cached + 1)
            blocks = -(-(unheld + own_tokens) // self._block_size)
            if unheld and blocks > blocks_left:
                continue
            tokens_left -= own_tokens
            blocks_left -= blocks
            context_left -= due.prefix_tokens
            has_room = tokens_left >= 0 and blocks_left >= 0
            if len(chosen) >= places or not has_room or (chosen and context_left < 0):
                break
            chosen.append(due)
        return chosen

    def _is_ready(self, due: _Due) -> bool:
        parent = due.parent
        # Load-bearing: blocks are in the cache once the tokens that fill them are computed and
        # known, and stay while a running request holds them.
        computed = parent.num_computed_tokens - parent.num_output_placeholders
        return (
            parent.status == RequestStatus.RUNNING
            and computed >= self._num_cached(due.prefix_tokens)
            and parent.request_id not in self._live_of
        )

    def _is_in_cache(self, request: ProbeRequest, due: _Due) -> bool:
        """Whether the parent's blocks are there; behind a window they are given up."""
        if self._holds_all:
            return True
        manager = self._scheduler.kv_cache_manager
        return bool(manager.get_computed_blocks(request)[1] >= self._num_cached(due.prefix_tokens))

    def _make(self, name: str, due: _Due) -> ProbeRequest:
        parent = due.parent
        token_ids = parent._all_token_ids[: due.prefix_tokens]
        token_ids += self._suffix
        request = ProbeRequest(
            request_id=name,
            prompt_token_ids=token_ids,
            sampling_params=sampled_as(parent.sampling_params),
            pooling_params=None,
            client_index=parent.client_index,
            arrival_time=parent.arrival_time,
            mm_features=parent.mm_features,
            lora_request=parent.lora_request,
            cache_salt=parent.cache_salt,
            priority=parent.priority,
        )
        # The parent's hashes are the probe's: hashing a long thought anew takes milliseconds.
        # Load-bearing: a hasher goes on behind the hashes that are there.
        request._block_hasher = parent._block_hasher
        request.block_hashes = parent.block_hashes[: self._num_shared_hashes(due)]
        request.update_block_hashes()
        return request

    def _num_places(self) -> int:
        """How many of them a step would take; making a probe for nothing takes long."""
        return min(self._limits.in_flight - len(self._live), free_seats(self._scheduler))

    def _num_blocks_left(self) -> int:
        """KV blocks that the next step's probes may have at most; running requests go first."""
        manager = self._scheduler.kv_cache_manager
        # Load-bearing: a waiting request must leave as many free.
        kept = manager.watermark_blocks if self._scheduler.running else 0
        return int(manager.block_pool.get_num_free_blocks() - kept)

    def _num_tokens_left(self, token_budget: int | None) -> int:
        """Tokens of the next step that running requests do not take."""
        scheduler = self._scheduler
        budget = scheduler.max_num_scheduled_tokens
        if token_budget is not None:
            budget = min(budget, token_budget)
        # Load-bearing: what upstream schedules of a running request, at most.
        wanted = (
            request.num_tokens_with_spec
            + request.num_output_placeholders
            - request.num_computed_tokens
            for request in scheduler.running
        )
        return int(budget - sum(min(max(tokens, 0), self._chunk_tokens) for tokens in wanted))

    def _num_cached(self, prefix_tokens: int) -> int:
        """Tokens of a prefix that a probe finds in the cache."""
        blocks = prefix_tokens // self._block_size
        # Load-bearing: where EAGLE drafts, the last block of a hit is computed again.
        if blocks and self._scheduler.kv_cache_manager.coordinator.eagle_group_ids:
            blocks -= 1
        return int(blocks * self._block_size)

    def _num_shared_hashes(self, due: _Due) -> int:
        per_hash = self._scheduler.kv_cache_manager.block_pool.hash_block_size
        return int(due.prefix_tokens // per_hash)


def sampled_as(asked: SamplingParams) -> SamplingParams:
    """Parameters of a probe whose parent asks for these.

    Load-bearing: one greedy request in a batch, or one with a seed, keeps model runner V2 from its
    fused sampler, whose fallback is compiled when it is first used. Penalties, biases, bad words,
    grammars and logprobs cost the whole batch too: a probe has none. What it samples is dropped,
    and its entropy is that of the raw logits.
    """
    return SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        max_tokens=1,
        detokenize=False,
    )


def _is_behind(image: Any, num_tokens: int) -> bool:
    """Whether the first ``num_tokens`` tokens hold the image, and nobody has to see it again."""
    # Load-bearing: every new request has the workers read what lies at an address in memory that
    # they share with the API server. It counts its own requests alone, and then puts another image
    # there: a worker that finds that one fails, and the engine with it.
    is_shared = image.data is not None and "address" in image.data
    return not is_shared and image.mm_position.offset + image.mm_position.length <= num_tokens


def keep_end_untold(scheduler: Any, request: ProbeRequest) -> None:
    """A probe was freed: no client is to be told so, in this step or the next."""
    # Load-bearing: ids of requests that ended, by client, until the next outputs; None where no
    # client wants them.
    ended = scheduler.finished_req_ids_dict
    if ended is None:
        return
    names = ended[request.client_index]
    names.discard(request.request_id)
    if not names:
        del ended[request.client_index]


def strip(outputs: dict[int, Any], names: AbstractSet[str]) -> None:
    """Take probes out of a step's ``EngineCoreOutputs``, by client, in place."""
    for client, batch in list(outputs.items()):
        batch.outputs = [each for each in batch.outputs if each.request_id not in names]
        if not (batch.outputs or batch.finished_requests or batch.scheduler_stats):
            del outputs[client]
