"""Carries changes of requests' phases from the scheduler to the API server.

A change travels with the tokens that made it, so that any number of API servers know the phases of
their own requests. Steps that change no phase carry nothing.
"""

from collections.abc import Mapping
from typing import Any

from vllm.v1.engine import output_processor

from meridian_patch.engine import wire
from meridian_patch.engine.api.recipients import takes_out
from meridian_patch.phase.progress import PhaseChange


def attach_changes(outputs: Mapping[int, Any], changes: Mapping[str, PhaseChange]) -> None:
    """Attach changes of phases to the outputs of their requests.

    Args:
        outputs: the result of ``update_from_output``: ``EngineCoreOutputs`` by client.
        changes: the phases after this step by request id.
    """
    # Without the patched output processor, they would stay in the caller's `kv_transfer_params`.
    if not takes_out(output_processor.OutputProcessor):
        return
    for client in outputs.values():
        for output in client.outputs:
            change = changes.get(output.request_id)
            if change is not None:
                # Load-bearing: the only dict with free keys there; it reaches the API server
                # unchanged.
                others = output.kv_transfer_params or {}
                output.kv_transfer_params = {**others, wire.PHASE: change}


def detach_change(output: Any) -> PhaseChange | None:
    """Take the change out of an ``EngineCoreOutput``; None: it has none."""
    params = output.kv_transfer_params
    if not params or wire.PHASE not in params:
        return None
    rest = {name: value for name, value in params.items() if name != wire.PHASE}
    output.kv_transfer_params = rest or None
    return PhaseChange(*params[wire.PHASE])
