"""Writes what early exit measured and decided to a file of JSON lines.

Runs in the EngineCore process. The events are described in docs/exit-trace.md.
"""

import json
import math
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from meridian_patch.exit.actions import Close, Outcome, Probe
from meridian_patch.exit.controller import ExitController

logger = init_logger("vllm.meridian_patch")


class ExitTrace:
    """Appends to one file; several engine cores may share it.

    Events are buffered until a thought ends, and then written together. If writing fails, that is
    logged once and the trace is off from then on.

    Args:
        path: the file; existing content is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        # The last verdict that was written, by request id.
        self._verdicts: dict[str, Close] = {}
        # Set permanently when writing has failed.
        self._is_closed = False

    def probed(
        self, request_id: str, probe: Probe, entropy_nats: float, controller: ExitController
    ) -> None:
        """Write a probe's result, which the controller has processed."""
        # A late result may belong to an earlier thought than the current one.
        is_of_thought = controller.is_thinking and probe.thought == controller.num_thoughts
        variance = controller.eat_variance if is_of_thought else math.inf
        self._add(
            "probe",
            request_id,
            probe.thought,
            probe.think_tokens,
            entropy_nats=_number(entropy_nats),
            variance_nats2=_number(variance),
        )
        self.looked(request_id, controller)

    def looked(self, request_id: str, controller: ExitController) -> None:
        """Write the controller's verdict, if it is new."""
        verdict = controller.verdict
        if verdict is not None:
            self._judged(request_id, controller.num_thoughts, verdict)

    def ended(self, request_id: str, outcome: Outcome, controller: ExitController) -> None:
        """Write the end of a thought; the next thought may have begun already."""
        thought = controller.num_thoughts - controller.is_thinking
        verdict = outcome.verdict
        if verdict is not None:
            self._judged(request_id, thought, verdict)
        self._end(request_id, thought, outcome.think_tokens, outcome.reason, verdict)

    def cut(self, request_id: str, controller: ExitController) -> None:
        """Write the end of a request; its current thought, if any, is cut off."""
        if controller.is_thinking:
            thought, think_tokens = controller.num_thoughts, controller.think_tokens
            self._end(request_id, thought, think_tokens, None, controller.verdict)

    def _judged(self, request_id: str, thought: int, verdict: Close) -> None:
        if self._verdicts.get(request_id) is not verdict:
            self._verdicts[request_id] = verdict
            think_tokens, fields = verdict.close_at, _fields(verdict)
            self._add("verdict", request_id, thought, think_tokens, **fields)

    def _end(
        self,
        request_id: str,
        thought: int,
        think_tokens: int,
        reason: str | None,
        verdict: Close | None,
    ) -> None:
        said = None if verdict is None else {"think_tokens": verdict.close_at, **_fields(verdict)}
        self._add("end", request_id, thought, think_tokens, reason=reason, verdict=said)
        self._verdicts.pop(request_id, None)
        self._flush()

    def _add(
        self, event: str, request_id: str, thought: int, think_tokens: int, **fields: Any
    ) -> None:
        if not self._is_closed:
            head = {"event": event, "request": request_id, "thought": thought}
            self._lines.append(json.dumps(head | {"think_tokens": think_tokens} | fields) + "\n")

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._is_closed:
            return
        try:
            # Opened each time, so that the file may be moved; unbuffered, so that lines of several
            # engine cores do not mix.
            with self._path.open("ab", buffering=0) as file:
                file.write("".join(lines).encode())
        except OSError as error:
            self._is_closed = True
            logger.error(
                "meridian_patch: exit.trace is off from here on, %s cannot be written: %s",
                self._path,
                error,
            )


def _fields(verdict: Close) -> dict[str, Any]:
    return {"reason": verdict.reason, "fired_at": verdict.fired_at, "why": verdict.why}


def _number(value: float) -> float | None:
    # JSON has only finite numbers.
    return value if math.isfinite(value) else None
