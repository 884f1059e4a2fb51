"""Brings what the phase tracker saw of a request to its exit controller."""

from collections.abc import Sequence

from meridian_patch.exit.actions import Action
from meridian_patch.exit.controller import ExitController
from meridian_patch.exit.strategies.base import Row
from meridian_patch.phase.tracker import Phase, RequestPhase


def follow(
    controller: ExitController, state: RequestPhase, seen: int, rows: Sequence[Row]
) -> Action | None:
    """Take in what a request came to know since it knew ``seen`` tokens.

    A boundary among these tokens ends the thought, whatever its last tokens would have led to:
    there is nothing left to close.

    Args:
        controller: of the request.
        state: after the tracker has observed these tokens.
        seen: known tokens before.
        rows: signals of the tokens since, one row each.

    Returns:
        What is to be done now; None for nothing.
    """
    if state.phase is not Phase.THINK:
        controller.end(max(state.tokens_before - seen, 0))
        return None
    begin = state.tokens_before
    if begin > seen:
        # A thought that was under way ended among these tokens too, its length is not kept.
        controller.end(0)
    if not controller.is_thinking:
        controller.start(max(seen - begin, 0))
    first = max(seen, begin)
    return controller.accept(state.known[first:], rows[first - seen :])
