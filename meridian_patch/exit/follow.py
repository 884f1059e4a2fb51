"""Passes a request's new tokens and phase changes to its exit controller."""

from collections.abc import Sequence

from meridian_patch.exit.actions import Action
from meridian_patch.exit.controller import ExitController
from meridian_patch.exit.strategies.base import Row
from meridian_patch.phase.tracker import Phase, RequestPhase


def follow(
    controller: ExitController, state: RequestPhase, seen: int, rows: Sequence[Row]
) -> Action | None:
    """Process the tokens of a request after its first ``seen`` known tokens.

    A boundary among these tokens ends the thought. The tokens before it are then not judged,
    because the thought can no longer be closed.

    Args:
        controller: the request's controller.
        state: the request's phase, after the tracker has observed these tokens.
        seen: number of known tokens that were processed before.
        rows: signals of the new tokens, one row each.

    Returns:
        The action to take now; None: no action.
    """
    if state.phase is not Phase.THINK:
        controller.end(max(state.tokens_before - seen, 0))
        return None
    begin = state.tokens_before
    if begin > seen:
        # An earlier thought ended among these tokens too; its length is not recorded.
        controller.end(0)
    if not controller.is_thinking:
        controller.start(max(seen - begin, 0))
    first = max(seen, begin)
    return controller.accept(state.known[first:], rows[first - seen :])
