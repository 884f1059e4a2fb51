"""The state that early exit keeps of each request that it follows."""

from dataclasses import dataclass, field
from typing import Any

from meridian_patch.config.schema import ExitConfig
from meridian_patch.engine.early_exit.step_signals import Kept
from meridian_patch.exit.actions import Close, Obstacles
from meridian_patch.exit.controller import ExitController
from meridian_patch.phase.tracker import RequestPhase


@dataclass(slots=True)
class WatchedRequest:
    """What early exit keeps of one request."""

    request: Any
    controller: ExitController
    state: RequestPhase
    config: ExitConfig
    # Whether the request sets options of early exit.
    has_options: bool
    # Number of known tokens passed to the controller, and the signals of later think tokens. Most
    # tokens are only kept here, and passed on together.
    seen: int
    kept: list[Kept] = field(default_factory=list)
    # From this number of known tokens on, each token is passed on. From the other two on, each end
    # of a line, or of a paragraph.
    fast_path_until: float = 0
    lines_from: float = 0
    paragraphs_from: float = 0
    # A close delayed while the last tokens may become a marker, and its limit in known tokens.
    due: Close | None = None
    due_by: int = 0
    # A close given up for a reason that may pass: it is tried again at each end of a line.
    given_up: Close | None = None
    # How often structured output refused a close that had begun, each after a skipped step, and at
    # how many ends of lines it is not tried again.
    num_refused: int = 0
    lines_left: int = 0
    # Sum over all thoughts that have ended, and indices of the tokens that their closes forced.
    think_tokens: int = 0
    forced: tuple[int, ...] = ()
    # Strategies that cannot close its thoughts, and whether its caller was told.
    not_enforced: Obstacles = field(default_factory=dict)
    is_reported: bool = True

    @property
    def thought_tokens(self) -> int:
        """Tokens of its thought behind the start marker, as vLLM's budget counts them."""
        state = self.state
        return state.tokens_in_phase + (state.given_think_tokens if state.is_given else 0)

    def was_refused(self) -> None:
        """Note a close that had begun and that structured output refused."""
        self.num_refused += 1
        self.lines_left = 2**self.num_refused - 1

    def cannot(self, obstacles: Obstacles) -> None:
        """Note strategies that cannot close a thought; earlier reasons take precedence."""
        known = self.not_enforced
        if self.config.mode == "enforce" and not obstacles.keys() <= known.keys():
            self.not_enforced = {**obstacles, **known}
            self.is_reported = False

    def retries_close(self, *, at_line: bool) -> bool:
        """Whether to try a close again that was given up.

        Args:
            at_line: the last token ends a line.
        """
        if self.given_up is None or not at_line:
            return False
        self.lines_left -= 1
        return self.lines_left < 0
