"""Answers the requests of ``meridian bench exit`` with a patched engine, and counts what it does.

See ``meridian_patch.bench.engine_main`` for the process.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import LLM, SamplingParams
from vllm.config import ReasoningConfig
from vllm.sampling_params import RequestOutputKind

from meridian_patch.engine.probe_request import ProbeRequest
from meridian_patch.errors import BenchError
from meridian_patch.replay.in_process import caller_id, core_of

if TYPE_CHECKING:
    import queue


class ExitWatch:
    """Counts what one scheduler does by what goes in and out of it, without our own counters.

    Args:
        scheduler: of an engine core of this process.

    Raises:
        BenchError: the engine is not patched, or cannot end thoughts.
    """

    def __init__(self, scheduler: Any) -> None:
        exits = getattr(scheduler, "early_exit", None)
        if exits is None:
            raise BenchError(
                f"{type(scheduler).__name__} ends no thoughts, expected the patched scheduler and "
                "a model of a known family"
            )
        self._scheduler = scheduler
        self._totals: Counter[str] = Counter()
        self._counted = dict(scheduler.phase_counters.totals)
        # By request, output indices of forced tokens.
        self._forced: dict[str, list[int]] = {}
        self._wrap(scheduler, "schedule", self._scheduled)
        self._wrap(scheduler, "update_from_output", self._updated)
        self._rows_of = exits.forced_closes.rows_of
        self._add_rows = exits.forced_closes.add_rows
        exits.forced_closes.add_rows = self._mask

    def take_forced(self, key: str) -> list[int]:
        """Output indices of a finished request whose tokens were forced."""
        return self._forced.pop(key, [])

    def take_totals(self) -> dict[str, int]:
        """Events since the last call, the product's own counters among them."""
        totals, self._totals = self._totals, Counter()
        before, self._counted = self._counted, dict(self._scheduler.phase_counters.totals)
        ours = {name: n - before.get(name, 0) for name, n in self._counted.items()}
        return {**{name: n for name, n in ours.items() if n}, **totals}

    def _wrap(self, owner: Any, name: str, after: Any) -> None:
        inner = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            after(result)
            return result

        setattr(owner, name, wrapper)

    def _scheduled(self, output: Any) -> None:
        totals, requests = self._totals, self._scheduler.requests
        totals["steps"] += 1
        totals["drafted"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        for name, count in output.num_scheduled_tokens.items():
            if isinstance(requests[name], ProbeRequest):
                totals["probes"] += 1
                totals["probe_tokens"] += count

    def _updated(self, outputs: dict[int, Any]) -> None:
        for client in outputs.values():
            for output in client.outputs:
                self._totals["accepted"] += max(0, len(output.new_token_ids) - 1)

    def _mask(self, output: Any, grammar: Any) -> Any:
        result = self._add_rows(output, grammar)
        # No request has structured output here: a first row of one token is that of a close, one of
        # nearly all tokens keeps an answer from thinking again.
        row = 0
        for name in result.structured_output_request_ids if result is not None else ():
            allowed = np.unpackbits(result.grammar_bitmask[row].view(np.uint8)).sum()
            drafts = output.scheduled_spec_decode_tokens
            row += self._rows_of(name, drafts)
            if allowed != 1:
                continue
            request = self._scheduler.requests[name]
            # Load-bearing: tokens on the way count from this step on, its own and its drafts among
            # them.
            in_step = 1 + len(drafts.get(name, ()))
            on_the_way = max(request.num_output_placeholders - in_step, 0)
            index = request.num_output_tokens + on_the_way
            self._forced.setdefault(caller_id(name), []).append(index)
        return result


class ExitEngine:
    """One engine and the arms that are run on it, one after the other.

    An arm is ``requests``: for each ``key``, ``prompt`` (token ids) and ``params`` (of
    ``SamplingParams``). As requests finish, a reply holds ``key``, ``ids``, ``finish_reason``,
    ``told`` (what the caller is told of the thought; empty: none has ended) and ``forced`` (output
    indices of tokens that our masks forced). An arm's last reply is ``totals``, by event.

    Args:
        job: ``engine``, arguments of ``vllm.LLM``; ``reasoning``, start and end marker for vLLM's
            own thinking budget (None: not used); ``concurrency``, the most requests at a time.
        send: takes the replies; the first one is empty.
    """

    def __init__(self, job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        arguments = dict(job["engine"])
        if job["reasoning"] is not None:
            start, end = job["reasoning"]
            arguments["reasoning_config"] = ReasoningConfig(
                reasoning_start_str=start, reasoning_end_str=end
            )
        llm = LLM(**arguments)
        self._engine = llm.llm_engine
        self._watch = ExitWatch(core_of(llm).scheduler)
        self._concurrency = int(job["concurrency"])
        self._send({})

    def serve(self, arms: "queue.Queue[dict[str, Any] | None]") -> None:
        """Run arms until None comes."""
        for arm in iter(arms.get, None):
            self._run(arm["requests"])

    def _run(self, requests: list[dict[str, Any]]) -> None:
        engine, waiting = self._engine, deque(requests)
        engine.reset_prefix_cache()
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < self._concurrency:
                self._add(waiting.popleft())
            for output in engine.step():
                if output.finished:
                    self._finish(output)
        self._send({"totals": self._watch.take_totals()})

    def _add(self, request: dict[str, Any]) -> None:
        params = SamplingParams(
            **request["params"], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt: Any = {"prompt_token_ids": request["prompt"]}
        self._engine.add_request(request["key"], prompt, params)

    def _finish(self, output: Any) -> None:
        completion = output.outputs[0]
        self._send(
            {
                "key": output.request_id,
                "ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "told": completion.meridian,
                "forced": self._watch.take_forced(output.request_id),
            }
        )
