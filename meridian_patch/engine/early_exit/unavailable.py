"""Answers requests that ask for early exit in an engine that has none, or none any more."""

from typing import Any

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import ExitConfig
from meridian_patch.engine.api.exit_summary import attach_all
from meridian_patch.exit.actions import ExitReport, Obstacle, Outcome
from meridian_patch.exit.strategies.build import STRATEGIES


class UnavailableEarlyExit:
    """Tells each such request once, with its first tokens, that its thoughts cannot be closed.

    Args:
        config: early exit settings of the configuration, of a family only where one is known.
        obstacle: why the engine has no early exit.
        tells_all: requests without options of their own are told, too, in mode ``enforce``.
    """

    def __init__(self, config: ExitConfig, obstacle: Obstacle, *, tells_all: bool = False) -> None:
        self._config = config
        self._obstacle = obstacle
        self._tells_all = tells_all
        # Reports to send, by request id.
        self._reports: dict[str, ExitReport] = {}
        # Requests among them that ended; their last outputs may be in the current step.
        self._ended: set[str] = set()

    def added(self, request: Any, options: RequestOptions) -> None:
        """Prepare the report of a new request, if its options ask for early exit."""
        if options.has_exit_options or self._tells_all:
            self.lost(request.request_id, options.exit_config(self._config))

    def lost(
        self, name: str, config: ExitConfig, outcome: Outcome | None = None, think_tokens: int = 0
    ) -> None:
        """Prepare the report of a request that may be under way.

        Args:
            name: the request's unique id.
            config: the settings that hold for the request.
            outcome: how its last thought ended; None: none has ended.
            think_tokens: of its thoughts that have ended.
        """
        if config.mode == "enforce":
            asked = (each.reason for each in STRATEGIES if each.is_on(config))
            obstacles = dict.fromkeys(asked, self._obstacle)
            self._reports[name] = ExitReport(outcome, think_tokens, obstacles)

    def freed(self, request: Any) -> None:
        """Note a request that ended."""
        if request.request_id in self._reports:
            self._ended.add(request.request_id)

    def report(self, outputs: dict[int, Any]) -> None:
        """Attach the reports to the requests' outputs in ``EngineCoreOutputs`` (by client)."""
        if not self._reports:
            return
        names = {each.request_id for batch in outputs.values() for each in batch.outputs}
        reports = {name: self._reports[name] for name in self._reports.keys() & names}
        attach_all(outputs, reports)
        for name in reports.keys() | self._ended:
            del self._reports[name]
        self._ended.clear()
