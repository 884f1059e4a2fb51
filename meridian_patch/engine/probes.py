"""Probes: requests of our own that see how sure a thought's answer is, and never leave the engine.

A probe is its parent's tokens so far, and behind them a trial boundary; the entropy of the one
token that it would sample is EAT (arXiv:2509.26522). Its blocks are its parent's, but for the last.
"""

from collections.abc import Set as AbstractSet
from itertools import count, islice
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.engine.probe_seats import ProbeSeats
from meridian_patch.exit.actions import Probe
from meridian_patch.phase.boundaries import TokenIds

# Requests that may run for each seat that is kept for probes.
_SEATS_PER_PROBE = 16


class _Due(NamedTuple):
    parent: Any
    probe: Probe
    # Tokens of the parent that stand before the trial boundary, its prompt's included.
    prefix_tokens: int


class Probes:
    """The probes that are due and those under way.

    1. A probe is offered to a step ahead of the waiting requests, behind all running ones, not
       while an answer waits, and not to every step: those that are due go together. One that gets
       no place in the step waits outside of the queue.
    2. It computes at most a block and the trial boundary: without its parent's blocks in the cache
       it is not made.
    3. Of a parent, one probe is under way and one is due; a newer one takes the place of the due.
    4. One that is preempted while its sample is on the way is waited for; any other is not worth
       a second try.
    5. Whatever becomes of the parent, its probes end with its thought.
    6. What its parent sees is in its parent's blocks. Where its own tokens would reach back into an
       image, and the encoder might have to run again, it is not made.

    Args:
        scheduler: the phase-aware scheduler.
        suffix: the trial boundary.
        most_in_flight: probes under way at a time.
        every_steps: of so many steps one may have probes.
    """

    def __init__(
        self, scheduler: Any, suffix: TokenIds, most_in_flight: int, every_steps: int
    ) -> None:
        self._scheduler = scheduler
        self.seats = ProbeSeats(scheduler)
        self._every_steps = every_steps
        self._steps = 0
        self._suffix = list(suffix)
        self._most_in_flight = most_in_flight
        self._block_size = scheduler.block_size
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
        is_turn = not (self._steps + 1) % self._every_steps
        return bool(self._due) and is_turn and self._num_places() > 0

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
        return min(self._most_in_flight, all_seats // _SEATS_PER_PROBE)

    def share_seats(self, *, is_kept: bool) -> None:
        """Once per step, before ``offer``: which free seats probes may take.

        Args:
            is_kept: whether seats are to be kept for probes where a request waits for one.
        """
        kept = self.kept_seats(self._scheduler.max_num_running_reqs) if is_kept else 0
        self.seats.share(kept, len(self._live), self._most_in_flight)

    def ask(self, parent: Any, probe: Probe, prefix_tokens: int) -> None:
        """A probe is due behind the parent's first ``prefix_tokens`` tokens, if it may be made."""
        full = self._num_full(prefix_tokens)
        # Embeddings in place of a prompt's tokens are not handed on.
        is_told = parent.prompt_embeds is None or parent.num_prompt_tokens <= full
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

    def offer(self) -> None:
        """Before a step is scheduled: put probes where it will find them."""
        self._steps += 1
        if not self._due or self._steps % self._every_steps:
            return
        scheduler = self._scheduler
        ready = (due for due in self._due.values() if self._is_ready(due))
        for due in list(islice(ready, max(min(self._num_places(), self.seats.places), 0))):
            name = next(self._names)
            request = self._make(name, due)
            del self._due[due.parent.request_id]
            self._live[name] = due
            self._live_of[due.parent.request_id] = name
            scheduler.requests[name] = request
            scheduler.waiting.prepend_request(request)

    def settle(self, output: Any) -> None:
        """After a step was scheduled: take back what found no place in it, or lost it."""
        if not self._live:
            return
        scheduler = self._scheduler
        requests = scheduler.requests
        for name in [n for n in self._live if requests[n].status == RequestStatus.WAITING]:
            request = requests.pop(name)
            scheduler.waiting.remove_request(request)
            # Load-bearing: who was passed over in the queue is remembered for the next step.
            scheduler.deferred_waiting.discard(request)
            due = self._forget(name)
            self._due.setdefault(due.parent.request_id, due)
        for name in self._displaced:
            request = requests[name]
            # Load-bearing: what was on the way at a preemption is delivered all the same, unless
            # it is to be dropped.
            is_sampled = request.num_stale_output_tokens and not request.is_prefill_chunk
            if is_sampled and not request.drop_stale_output:
                scheduler.waiting.remove_request(request)
            else:
                self._abort(name)
        self._displaced.clear()
        for name in self._live:
            computed = output.num_scheduled_tokens.get(name, 0)
            self.most_computed_tokens = max(self.most_computed_tokens, computed)

    def displaced(self, request_id: str) -> None:
        """A probe was preempted."""
        self._displaced.append(request_id)

    def freed(self, request_id: str) -> _Due:
        """A probe is over; returns what it was for."""
        self.num_probes += 1
        return self._forget(request_id)

    def _forget(self, name: str) -> _Due:
        due = self._live.pop(name)
        del self._live_of[due.parent.request_id]
        return due

    def _abort(self, name: str) -> None:
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _is_ready(self, due: _Due) -> bool:
        parent = due.parent
        full = self._num_full(due.prefix_tokens)
        # Load-bearing: blocks are in the cache once the tokens that fill them are computed and
        # known, and stay while a running request holds them.
        computed = parent.num_computed_tokens - parent.num_output_placeholders
        return (
            parent.status == RequestStatus.RUNNING
            and computed >= full
            and parent.request_id not in self._live_of
        )

    def _make(self, name: str, due: _Due) -> ProbeRequest:
        parent = due.parent
        request = ProbeRequest(
            request_id=name,
            prompt_token_ids=parent._all_token_ids[: due.prefix_tokens] + self._suffix,
            sampling_params=SamplingParams(max_tokens=1, temperature=0, detokenize=False),
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
        # Load-bearing: with as many running as may run nobody gets a place.
        scheduler = self._scheduler
        places = scheduler.max_num_running_reqs - len(scheduler.running)
        return int(min(self._most_in_flight - len(self._live), places))

    def _num_full(self, prefix_tokens: int) -> int:
        """Tokens of a prefix that fill blocks."""
        return prefix_tokens // self._block_size * self._block_size

    def _num_shared_hashes(self, due: _Due) -> int:
        per_hash = self._scheduler.kv_cache_manager.block_pool.hash_block_size
        return int(due.prefix_tokens // per_hash)


def _is_behind(image: Any, num_tokens: int) -> bool:
    """Whether the first ``num_tokens`` tokens hold the image, and nobody has to see it again."""
    # Load-bearing: every new request has the workers read what lies at an address in memory that
    # they share with the API server. It counts its own requests alone, and then puts another image
    # there: a worker that finds that one fails, and the engine with it.
    is_shared = image.data is not None and "address" in image.data
    return not is_shared and image.mm_position.offset + image.mm_position.length <= num_tokens


def strip(outputs: dict[int, Any], names: AbstractSet[str]) -> None:
    """Take probes out of a step's ``EngineCoreOutputs``, by client, in place."""
    for client, batch in list(outputs.items()):
        batch.outputs = [each for each in batch.outputs if each.request_id not in names]
        if batch.finished_requests:
            batch.finished_requests = batch.finished_requests - names
        if not (batch.outputs or batch.finished_requests or batch.scheduler_stats):
            del outputs[client]
