"""The endpoint by which a running server's policy and early exit are switched.

It is a plug-in for endpoints, as vLLM loads them: only where ``VLLM_PLUGINS`` names it.
"""

import asyncio
from argparse import Namespace
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict
from vllm.engine.protocol import EngineClient
from vllm.v1.engine.exceptions import EngineDeadError

from meridian_patch.config.policy import PolicyName
from meridian_patch.config.schema import ExitMode
from meridian_patch.engine import wire

# Load-bearing: vLLM asks for its API key in front of paths that begin so.
PATH = "/v1/meridian/policy"
# EngineCore answers between two steps.
_LIMIT_S = 8.0

router = APIRouter()


class Wanted(BaseModel):
    """What is to be in force; a field that is unset stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: PolicyName | None = None
    exit: ExitMode | None = None


class LiveSwitch:
    """The plug-in, as vLLM builds it."""

    name = wire.SWITCH
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the endpoint to vLLM's server."""
        app.include_router(router)

    async def init_state(
        self, engine_client: EngineClient | None, state: Any, args: Namespace
    ) -> None:
        """Keep the client by which the endpoint reaches the engine."""
        del args
        state.meridian_engine = engine_client


@router.get(PATH)
async def show(request: Request) -> dict[str, Any]:
    """What is in force in each engine that this API server knows."""
    return await _turn(request, Wanted())


@router.post(PATH)
async def turn(request: Request, wanted: Wanted) -> dict[str, Any]:
    """Switch all engines that this API server knows; what one refuses is in its reply."""
    return await _turn(request, wanted)


async def _turn(request: Request, wanted: Wanted) -> dict[str, Any]:
    # Load-bearing: the client of EngineCore, which reaches one engine or all ranks.
    client = request.app.state.meridian_engine.engine_core
    ask = client.call_utility_all_async(wire.SWITCH, wanted.policy, wanted.exit)
    try:
        return {"engines": await asyncio.wait_for(ask, _LIMIT_S)}
    except TimeoutError:
        raise HTTPException(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"EngineCore has not answered for {_LIMIT_S:.0f} s; it switches once its step ends",
        ) from None
    except EngineDeadError:
        # vLLM has a reply of its own, and ends the server.
        raise
    except Exception as error:
        raise HTTPException(HTTPStatus.CONFLICT, _why(error)) from error


def _why(error: Exception) -> str:
    # Load-bearing: vLLM puts its own words before an exception of a utility method.
    text = str(error)
    if wire.SWITCH in text and "no attribute" in text:
        return "the engine runs stock vLLM: there is nothing to switch"
    return text.rpartition(" method failed: ")[2]
