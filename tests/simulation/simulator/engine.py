"""One engine without a model: its core's loop, around a scheduler of vLLM's or ours.

The loop is that of vLLM's ``EngineCore``: ``step`` with one batch in flight, else
``step_with_batch_queue``. Time is virtual: a step takes longer the more tokens it computes.
"""

from collections import Counter, deque
from concurrent.futures import Future
from copy import copy
from typing import Any

import torch
from routed_experts import ExpertsWorker
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine.upstream import is_release
from simulator.axes import Case
from simulator.build import build, paces_itself, pool_blocks
from simulator.entropies import Entropies
from simulator.ledger import Ledger, Record
from simulator.worker import Step, Workers
from simulator.workload import Ask, Workload

STEP_S, TICK_S = 0.01, 1e-4
# What a token adds to a step: on a machine that is slow at them, and on one that is not.
TOKEN_S = {"slow": 5e-4, "fast": 2e-5}
# What captured graphs save in a step that only decodes, and in any step that they run.
PIECES_S, LAUNCH_S = 0.01, 0.01


class Clock:
    """Seconds of virtual time; stands in for the functions of module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Arm:
    """One scheduler with its load.

    Attributes:
        tick: iterations of the core's loop so far.
        tick_s: seconds of a step of mean length, which requests come in by.
        num_steps: calls of ``schedule``.
        watch: is told of every step; see ``Watch``.
    """

    def __init__(self, case: Case, clock: Clock, *, is_stock: bool) -> None:
        self.case = case
        self.clock = clock
        self.is_stock = is_stock
        # Prefix hashes that the events tell to be cached, by group, and of how many blocks.
        self.told_cached: Counter[Any] = Counter()
        built = build(case, is_stock=is_stock)
        self.scheduler, self._grammars = built.scheduler, built.grammars
        self._depth, self._tier = built.depth, built.tier
        self.scheduler.kv_event_publisher = self
        self.workload = Workload(case, (pool_blocks(case) - 1) * case.block)
        self.ledger = Ledger(case, self.workload.boundaries, is_stock=is_stock)
        self.entropies = Entropies(case, self.ledger)
        self.workers = Workers(
            case.length, self.ledger.speaker_for, self.entropies, case.drafts, case.seed
        )
        self._experts = ExpertsWorker(self.scheduler) if case.experts else None
        self.tick = 0
        self.num_steps = 0
        self.tick_s = self.workload.mean_tick(self.seconds)
        self._begin_s = clock.now
        self.in_flight: deque[Step] = deque()
        self.watch = Watch()
        # Time at which each step under way is done, in order; and of the last.
        self._done_s: dict[int, float] = {}
        self._last_done_s = 0.0
        # Grammars that are being compiled, and when each is done.
        self._compiling: list[tuple[int, Future[Any], Any]] = []
        self._hasher = None
        if case.prefix or case.connector != "none":
            per_hash = self.scheduler.hash_block_size
            # From vLLM 0.33 on a block's hash covers the tokens behind it that a drafter reads.
            config = self.scheduler.vllm_config
            behind = [config.num_hash_lookahead_tokens] if is_release("0.33") else []
            self._hasher = get_request_block_hasher(per_hash, sha256, *behind)

    @property
    def is_drained(self) -> bool:
        """No request is left, and no other will arrive."""
        return (
            self.workload.next_tick is None
            and not self.scheduler.has_requests()
            and not self.in_flight
        )

    def close(self) -> None:
        """Nothing comes any more."""
        if self._experts is not None:
            self._experts.close()

    def seconds(self, tokens: int, *, has_prompts: bool = False) -> float:
        """What a step of so many tokens takes."""
        seconds = STEP_S + TOKEN_S[self.case.machine] * tokens
        graphs = self.case.graphs
        if graphs is not None:
            seconds += PIECES_S * has_prompts + LAUNCH_S * (tokens > graphs)
        return seconds

    def publish(self, batch: Any) -> None:
        """Take the place of vLLM's event publisher."""
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.told_cached.clear()
                continue
            if event.medium != self.scheduler.kv_cache_manager.block_pool.medium:
                # Of an offload tier.
                continue
            change = 1 if isinstance(event, BlockStored) else -1
            for each in event.block_hashes:
                self.told_cached[event.group_idx, each] += change

    @property
    def may_prefill(self) -> bool:
        """Whether the engine core lets the next step compute prompts."""
        return paces_itself(self.case) or self.num_steps % self.case.cadence == 0

    def begin_tick(self) -> None:
        """Requests come in."""
        self.tick += 1
        self.clock.now += TICK_S
        next_tick = self.workload.next_tick
        if next_tick is not None and not (self.scheduler.has_requests() or self.in_flight):
            self.clock.now = max(self.clock.now, self._begin_s + next_tick * self.tick_s)
        for due in [each for each in self._compiling if each[0] <= self.tick]:
            self._compiling.remove(due)
            due[1].set_result(due[2])
        now = self._load_tick()
        for tick in sorted(each for each in self.workload.arrivals if each <= now):
            for ask in self.workload.arrivals.pop(tick):
                self.add(ask)

    def step(self) -> None:
        """One iteration of the core's loop."""
        scheduler = self.scheduler
        deferred = None
        if scheduler.has_requests():
            step, is_pending = self._begin()
            executed = step.output.total_num_scheduled_tokens > 0
            if executed and is_pending and self._depth > 1:
                deferred = step
            else:
                masks = scheduler.get_grammar_bitmask(step.output) if executed else None
                self._sample(step, masks)
                self.in_flight.append(step)
                is_full = len(self.in_flight) >= self._depth
                if not is_full and (executed or scheduler.has_requests()):
                    return
        elif not self.in_flight:
            return
        if self.in_flight:
            last = self.in_flight[-1]
            self._deliver(self.in_flight.popleft())
        if deferred is not None:
            if self.case.drafts:
                # Load-bearing: those of the step sampled last, which may not be back yet.
                drafts = self.workers.take_drafts(last)
                if drafts is not None:
                    scheduler.update_draft_token_ids_in_output(drafts, deferred.output)
            deferred.is_deferred = True
            self._sample(deferred, scheduler.get_grammar_bitmask(deferred.output))
            self.in_flight.append(deferred)

    def deliver_all(self) -> None:
        """Wait for everything that is in flight, as a pause does."""
        while self.in_flight:
            self._deliver(self.in_flight.popleft())

    def abort(self, names: list[str] | None) -> None:
        """Abort requests; None: all."""
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        for name in self.ledger.records if names is None else names:
            self.ledger.aborted(name)

    def add(self, ask: Ask) -> None:
        """A request, or a session's next chunk, comes in."""
        record = self.ledger.records.get(ask.name)
        if record is not None and (record.is_over or ask.name not in self.scheduler.requests):
            # The session is gone.
            return
        request = self._make(ask)
        if record is None:
            self.ledger.add(ask, request)
            self.scheduler.add_request(request)
            return
        is_paused = record.request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        self.scheduler.add_request(request)
        if is_paused:
            if ask.session:
                self.ledger.went_on(record)
            else:
                self.ledger.aborted(ask.name)

    def live(self) -> list[Record]:
        """Requests that have not ended."""
        return [record for record in self.ledger.records.values() if not record.is_over]

    def _load_tick(self) -> int:
        """Up to which tick of the load requests have come in by now."""
        return round((self.clock.now - self._begin_s) / self.tick_s)

    def _begin(self) -> tuple[Step, bool]:
        output: SchedulerOutput = self.watch.schedule(self)
        self.num_steps += 1
        step = self.workers.execute(output)
        if self._experts is not None:
            self._experts.begin(output)
        requests = self.scheduler.requests
        step.preemptions = {name: requests[name].num_preemptions for name in step.starts}
        begin_s = max(self.clock.now, self._last_done_s)
        tokens = output.total_num_scheduled_tokens
        decodes = len(output.num_scheduled_tokens) * (1 + self.case.drafts)
        self._last_done_s = begin_s + self.seconds(tokens, has_prompts=tokens > decodes)
        self._done_s[id(output)] = self._last_done_s
        return step, output.pending_structured_output_tokens

    def _sample(self, step: Step, masks: Any) -> None:
        self.workers.sample(step, masks)
        assert step.result is not None
        if self._experts is not None:
            step.experts = self._experts.sampled(step.output, step.starts, step.result)
        if self._tier is not None:
            if step.result is EMPTY_MODEL_RUNNER_OUTPUT:
                step.result = copy(EMPTY_MODEL_RUNNER_OUTPUT)
            self._tier.run(step.output, step.result, self.clock.now, STEP_S)
        elif self.scheduler.connector is not None:
            report = self.scheduler.connector.report(step.output.finished_req_ids)
            if step.result is EMPTY_MODEL_RUNNER_OUTPUT:
                step.result = ModelRunnerOutput.with_kv_conn_output_only(report)
            else:
                step.result.kv_connector_output = report

    def _deliver(self, step: Step) -> None:
        self.clock.now = max(self.clock.now, self._done_s.pop(id(step.output)))
        if self._experts is not None and step.experts is not None:
            self._experts.deliver(step.experts, step.result)
        waiting = self.scheduler.waiting
        away = [r for r in waiting if r.resumable and r.status == RequestStatus.PREEMPTED]
        outputs = self.watch.update(self, step)
        for session in away:
            # Load-bearing: vLLM 0.32 takes a session whose turn ends while it is preempted out of
            # its queue again, also where the next chunk was there: it never goes on, in stock too.
            if session.status == RequestStatus.WAITING and session not in waiting:
                waiting.add_request(session)
        self.ledger.take(outputs, self.clock.now)
        for record in self.ledger.take_ended():
            self.workload.next_turn(record.ask, record.speaker.said, self._load_tick())
        if self.case.drafts and not self.case.is_async and step.result.req_ids:
            drafts = self._drafts_of_running(step)
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)

    def _drafts_of_running(self, step: Step) -> DraftTokenIds | None:
        """The drafts that a step made, but for requests that were preempted since.

        Load-bearing: vLLM 0.32 hands them to those too. A request that resumes with some computes
        its known tokens in one step and the drafts alone in the next, while the token before them
        is on its way, and never goes on: in stock as with us.
        """
        made = self.workers.take_drafts(step)
        if made is None:
            return None
        requests = self.scheduler.requests
        pairs = [
            pair
            for pair in zip(made.req_ids, made.draft_token_ids, strict=True)
            if pair[0] not in requests
            or requests[pair[0]].num_preemptions == step.preemptions.get(pair[0])
        ]
        return DraftTokenIds([name for name, _ in pairs], [drafts for _, drafts in pairs])

    def _make(self, ask: Ask) -> Request:
        parameters = SamplingParams(
            temperature=0,
            max_tokens=ask.max_tokens,
            extra_args=ask.extra or None,
            stop_token_ids=list(ask.stops),
            **ask.sampling,
            structured_outputs=(
                StructuredOutputsParams(regex=ask.script.rules) if ask.script.rules else None
            ),
        )
        if parameters.structured_outputs:
            # As vLLM's front end does; from 0.33 on the grammar manager asks for it.
            parameters.structured_outputs._backend = "xgrammar"
        parameters.update_from_generation_config({}, 259)
        lora = None
        if ask.adapter:
            lora = LoRARequest(f"adapter{ask.adapter}", ask.adapter, f"adapter{ask.adapter}")
        request = Request(
            request_id=ask.name,
            prompt_token_ids=None if ask.is_embedded else list(ask.prompt),
            prompt_embeds=torch.zeros(len(ask.prompt), 1) if ask.is_embedded else None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=self.clock.now,
            priority=ask.priority,
            lora_request=lora,
            cache_salt=ask.salt,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=identity,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for offset, length, identity in ask.images
            ],
            block_hasher=self._hasher,
            resumable=bool(ask.session),
        )
        if ask.script.rules:
            self._compile(ask, request)
        return request

    def _compile(self, ask: Ask, request: Request) -> None:
        self._grammars.grammar_init(request)
        if ask.grammar_delay:
            structured = request.structured_output_request
            later: Future[Any] = Future()
            self._compiling.append((self.tick + ask.grammar_delay, later, structured.grammar))
            structured.grammar = later


class Watch:
    """Calls the scheduler; others look at what goes in and out."""

    def schedule(self, arm: Arm) -> SchedulerOutput:
        return arm.scheduler.schedule(not arm.may_prefill)

    def update(self, arm: Arm, step: Step) -> dict[int, Any]:
        return arm.scheduler.update_from_output(step.output, step.result)
