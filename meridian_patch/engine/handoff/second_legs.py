"""Goes on, at an answer engine, with requests whose thought has ended; or at home.

One object per client of EngineCore, in the API server, below detokenizer, parsers and endpoints:
what answer engines generate joins what the own engine generates, by request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import vllm
from packaging.version import Version
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from meridian_patch.engine import wire
from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.handoff.answer_servers import AnswerServer, AnswerServers
from meridian_patch.handoff.second_leg import (
    TRANSFER,
    TRANSFERS,
    LegLost,
    Piece,
    SampledLogprob,
    extra_args_after,
    limits_after,
    wire_body,
)
from meridian_patch.handoff.stays import why_it_stays
from meridian_patch.handoff.ticket import OFFER
from meridian_patch.telemetry.handoffs import Handoffs

# Outputs of answer engines are collected for so long: each delivery costs the API server a record
# of statistics.
_BATCH_S: Final = 0.004
_RIDERS: Final = (wire.PHASE, wire.SUMMARY)

COUNTS_SAMPLED: Final = Version(vllm.__version__) < Version("0.33")
"""Load-bearing: the token endpoint's log-probabilities count the sampled token as one of them."""

Add = Callable[[Any], Awaitable[None]]


class _Moving:
    """A request that may move.

    Attributes:
        request: as the client's server added it.
        token_ids: what its client was given.
        engine_index: of the engine in which it thinks.
        num_thought: tokens when it left; None before.
        leg: its task at an answer engine.
        home_name: its id in the own engine after it came back.
        ended_at_s: when its thought ended.
    """

    __slots__ = (
        *("request", "token_ids", "engine_index", "num_thought", "leg", "home_name"),
        "ended_at_s",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.engine_index = 0
        self.num_thought: int | None = None
        self.leg: asyncio.Task[None] | None = None
        self.home_name: str | None = None
        self.ended_at_s = 0.0


class SecondLegs:
    """The requests of one client that move.

    Args:
        servers: the answer engines.
        deliver: takes ``EngineCoreOutputs``, as if EngineCore had sent them.
        add: adds an ``EngineCoreRequest`` to the own engine.
        rank_of: the data-parallel rank that ``EngineCoreRequest`` names, of an engine's index.
        handoffs: counts what becomes of them.
        binds_thoughts: whether grammars begin with the thought on this server.
        most_logprobs: log-probabilities per token that answer engines give; None: any number.

    Attributes:
        is_draining: no further request is offered.
    """

    def __init__(
        self,
        servers: AnswerServers,
        deliver: Callable[[Any], None],
        add: Add,
        rank_of: Callable[[int], int | None],
        handoffs: Handoffs,
        *,
        binds_thoughts: bool,
        most_logprobs: int | None = None,
    ) -> None:
        self._servers = servers
        self._deliver = deliver
        self._add = add
        self._rank_of = rank_of
        self._handoffs = handoffs
        self._why_it_stays = partial(
            why_it_stays, binds_thoughts=binds_thoughts, most_logprobs=most_logprobs
        )
        self.is_draining = False
        self._is_ended = False
        self._moving: dict[str, _Moving] = {}
        # The ids of requests that came back, in the own engine.
        self._home_names: dict[str, str] = {}
        self._batch: dict[int, list[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = ApiGuard("a request was not moved to an answer engine")

    @property
    def num_away(self) -> int:
        """Requests that are at answer engines, or may still go there."""
        return len(self._moving)

    def offered(self, request: Any) -> Any:
        """The request as the own engine gets it: with a client's tickets removed, and an offer."""
        params = request.sampling_params
        if params is None:
            return request
        rest = {k: v for k, v in (params.extra_args or {}).items() if k not in TRANSFERS}
        # A request that vLLM only adds to end it has no output.
        is_open = not (self.is_draining or request.abort_immediately)
        why = self._why_it_stays(request) if is_open else None
        if why:
            self._handoffs.stays(why)
        if why or not is_open:
            if rest == (params.extra_args or {}):
                return request
        else:
            self._loop = asyncio.get_running_loop()
            self._moving[request.request_id] = _Moving(request)
            rest |= {TRANSFER: dict(OFFER)}
        return _with_params(request, extra_args=rest or None)

    def take(self, outputs: Any) -> None:
        """Take what is ours out of ``EngineCoreOutputs``, and begin the legs that are due."""
        if not self._moving:
            return
        kept = []
        for output in outputs.outputs:
            is_kept = True
            # vLLM would end every request.
            with self._guard:
                is_kept = self._is_for_client(output, outputs)
            if is_kept:
                kept.append(output)
        outputs.outputs = kept

    def _is_for_client(self, output: Any, outputs: Any) -> bool:
        name = self._home_names.get(output.request_id, output.request_id)
        moving = self._moving.get(name)
        if moving is None:
            return not output.request_id.endswith(wire.AT_HOME)
        if moving.home_name is not None:
            self._come_home(name, output)
        moving.token_ids += output.new_token_ids
        params = output.kv_transfer_params
        if output.finish_reason is None:
            return True
        if moving.home_name is None and params and wire.FACTS in params:
            moving.engine_index = outputs.engine_index
            return self._leave(name, moving, output)
        self._forget(name)
        return True

    def _leave(self, name: str, moving: _Moving, output: Any) -> bool:
        """Begin a request's leg; whether the output still has something for its client."""
        ticket = output.kv_transfer_params
        riders = {key: ticket.pop(key) for key in _RIDERS if key in ticket}
        output.finish_reason = output.stop_reason = None
        output.kv_transfer_params = riders or None
        moving.num_thought = len(moving.token_ids)
        moving.ended_at_s = time.monotonic()
        if self._is_ended:
            # EngineCore ends, and its last step ended a thought.
            self._end(name, moving, FinishReason.ABORT)
        else:
            moving.leg = asyncio.create_task(self._go(name, moving, ticket))
        return bool(output.new_token_ids or riders or output.prefill_stats)

    def _come_home(self, name: str, output: Any) -> None:
        """Make an output of a request that was added again one of the request."""
        output.request_id = name
        # Its prompt holds what it said, so that none of these is about the request.
        output.prefill_stats = output.events = None
        output.kv_transfer_params = None

    async def _go(self, name: str, moving: _Moving, ticket: dict[str, Any]) -> None:
        """Answer at an answer engine, or come home."""
        may_read, server = False, self._servers.pick()
        if server is not None:
            try:
                await self._answer(name, moving, ticket, server)
            except LegLost as lost:
                may_read = lost.may_read
                if not server.rests:
                    server.losses.log(f"{server.url}: {lost}")
            except Exception as error:
                may_read = True
                self._guard.failed(error)
            else:
                self._handoffs.ended("moved")
                return
        if self._is_ended:
            self._end(name, moving, FinishReason.ABORT)
            return
        try:
            await self._back(name, moving, None if may_read else ticket)
        except Exception as error:
            self._guard.failed(error)
            self._end(name, moving, FinishReason.ERROR)

    async def _answer(
        self, name: str, moving: _Moving, ticket: dict[str, Any], server: AnswerServer
    ) -> None:
        request = moving.request

        def body_for(model: str) -> bytes:
            lora = request.lora_request
            return wire_body(
                name=name,
                token_ids=[*request.prompt_token_ids, *moving.token_ids],
                sampling=_plain(request.sampling_params),
                num_output_tokens=len(moving.token_ids),
                ticket=ticket,
                model=model if lora is None else lora.lora_name,
                cache_salt=request.cache_salt,
                priority=request.priority or None,
            )

        async with self._servers.asked(server, body_for) as stream:
            async for pieces in stream:
                for piece in pieces:
                    if self._put(name, moving, piece):
                        return
            raise LegLost("its stream ended before the answer", is_engines=True)

    def _put(self, name: str, moving: _Moving, piece: Piece) -> bool:
        """Give a piece to the client; whether it was the last."""
        ids = list(piece.token_ids or ())
        logprobs = None
        if piece.logprobs is not None and ids:
            if len(piece.logprobs.content) != len(ids):
                raise LegLost("it sent log-probabilities of other tokens")
            wanted = moving.request.sampling_params.logprobs
            logprobs = _logprobs(piece.logprobs.content, wanted)
        output = EngineCoreOutput(request_id=name, new_token_ids=ids, new_logprobs=logprobs)
        if piece.finish_reason is not None:
            output.finish_reason = FinishReason[piece.finish_reason.upper()]
            output.stop_reason = piece.stop_reason
        # Nothing fails from here on: what counts as given to the client is given.
        if len(moving.token_ids) == moving.num_thought and ids:
            self._handoffs.gap(time.monotonic() - moving.ended_at_s)
        moving.token_ids += ids
        if output.finish_reason is not None:
            self._forget(name)
        self._collect(moving.engine_index, output)
        return output.finish_reason is not None

    async def _back(self, name: str, moving: _Moving, unsent: dict[str, Any] | None) -> None:
        """Go on in the own engine, whose prefix cache has the tokens.

        Args:
            name: the request's id.
            moving: the request.
            unsent: its ticket, if no engine was given it: no engine reads what is kept for it.
        """
        self._flush()
        request, num_tokens = moving.request, len(moving.token_ids)
        # Load-bearing: the id of a request whose blocks wait for a reader is still known, and ends
        # EngineCore if it is added again.
        moving.home_name = f"{name}-{wire.AT_HOME}"
        self._home_names[moving.home_name] = name
        moving.leg = None
        self._handoffs.ended("answered_at_home")
        sampling = _plain(request.sampling_params)
        extra_args = extra_args_after(sampling, num_tokens) or {}
        transfer = {}
        # Load-bearing: NIXL's name for the request whose blocks it keeps; Mooncake has none.
        if unsent is not None and unsent.get("remote_request_id"):
            transfer[wire.RELEASE] = unsent["remote_request_id"]
        if request.sampling_params.structured_outputs is not None:
            transfer[wire.ANSWERED] = num_tokens - (moving.num_thought or 0)
        if transfer:
            extra_args[TRANSFER] = transfer
        again = _with_params(
            request, extra_args=extra_args or None, **limits_after(sampling, num_tokens)
        )
        again = msgspec.structs.replace(
            again,
            request_id=moving.home_name,
            prompt_token_ids=[*request.prompt_token_ids, *moving.token_ids],
            data_parallel_rank=self._rank_of(moving.engine_index),
            reasoning_ended=True,
        )
        await self._add(again)

    def _end(self, name: str, moving: _Moving, reason: Any) -> None:
        if self._forget(name):
            output = EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=reason)
            self._collect(moving.engine_index, output)

    def _forget(self, name: str) -> bool:
        moving = self._moving.pop(name, None)
        if moving is not None and moving.home_name is not None:
            self._home_names.pop(moving.home_name, None)
        return moving is not None

    def _collect(self, engine_index: int, output: Any) -> None:
        if not self._batch:
            asyncio.get_running_loop().call_later(_BATCH_S, self._flush)
        self._batch.setdefault(engine_index, []).append(output)

    def _flush(self) -> None:
        batch, self._batch = self._batch, {}
        for index, outputs in batch.items():
            self._deliver(EngineCoreOutputs(engine_index=index, outputs=outputs))

    def aborted(self, names: Iterable[str]) -> list[str]:
        """End legs of these requests; the ids under which the own engine knows the others."""
        own = []
        for name in names:
            moving = self._moving.get(name)
            if moving is None or (moving.leg is None and moving.home_name is None):
                own.append(name)
            elif moving.home_name is not None:
                own.append(moving.home_name)
            elif moving.leg is not None:
                # Closing the connection ends the request there.
                moving.leg.cancel()
                self._handoffs.ended("aborted")
            self._forget(name)
        return own

    def end(self) -> None:
        """End all legs, as EngineCore ends its requests when it stops; from any thread."""
        self._is_ended = self.is_draining = True
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.close(), self._loop)

    async def close(self) -> None:
        """End all legs, and their connections."""
        for name, moving in list(self._moving.items()):
            if moving.leg is not None:
                moving.leg.cancel()
                self._end(name, moving, FinishReason.ABORT)
        self._flush()
        await self._servers.close()


def _plain(params: Any) -> dict[str, Any]:
    """Sampling parameters as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(params)
    # Load-bearing: msgspec leaves out what has its default, and 16 is one of a limit.
    plain["max_tokens"] = params.max_tokens
    if params.logprobs is not None and COUNTS_SAMPLED:
        plain["logprobs"] = params.logprobs + 1
    return plain


def _with_params(request: Any, **changed: Any) -> Any:
    """The request with other sampling parameters; choices of one prompt share theirs."""
    params = copy(request.sampling_params)
    for name, value in changed.items():
        setattr(params, name, value)
    return msgspec.structs.replace(request, sampling_params=params)


def _logprobs(content: Sequence[SampledLogprob], wanted: int) -> LogprobsLists:
    """As EngineCore sends them: the sampled token, then the ``wanted`` likeliest ones."""
    ids, values = [], []
    for sampled in content:
        # The sampled token's own rank counts where it is among the likeliest.
        ranked = {each.rank: each for each in (*sampled.top_logprobs, sampled)}
        row = [sampled, *(ranked.get(rank + 1, sampled) for rank in range(wanted))]
        ids.append([each.token_id for each in row])
        values.append([each.logprob for each in row])
    ranks = [each.rank or 0 for each in content]
    return LogprobsLists(
        np.array(ids, dtype=np.int32),
        np.array(values, dtype=np.float32),
        np.array(ranks, dtype=np.int32),
    )
