"""``meridian bench exit-trace``: pictures of what early exit saw, from a file of ``exit.trace``."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meridian_patch.bench.options import read_whole
from meridian_patch.errors import BenchError


@dataclass
class TracedThought:
    """One thought of a trace; see docs/exit-trace.md for the events.

    Attributes:
        request: id as traced.
        number: of the thought in its request, from 1.
        probes: events of its probes, in order.
        verdict: the event; None: there was none.
        end: the event; None: it is not in the trace.
    """

    request: str
    number: int
    probes: list[Mapping[str, Any]] = field(default_factory=list)
    verdict: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The caller's id, without vLLM's random ending."""
        return self.request.rpartition("-")[0] or self.request


def read_trace(path: Path) -> list[TracedThought]:
    """The thoughts of a trace, in the order of their first events.

    Raises:
        BenchError: the file cannot be read, or a line is none of a trace; names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    thoughts: dict[tuple[str, int], TracedThought] = {}
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
            key = event["request"], event["thought"]
            kind, _ = event["event"], event["think_tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{path}, line {number} is {line[:60]!r}, expected an event of exit.trace"
            ) from error
        thought = thoughts.setdefault(key, TracedThought(*key))
        if kind == "probe":
            thought.probes.append(event)
        elif kind == "verdict":
            thought.verdict = event
        else:
            thought.end = event
    return list(thoughts.values())


def add_exit_trace(benches: Any) -> None:
    """Add ``exit-trace`` to the subcommands of ``meridian bench``."""
    command = benches.add_parser(
        "exit-trace",
        help="plots a file of exit.trace",
        description="Draws entropy and EAT's variance over the think tokens of the thoughts with "
        "most probes, with verdict and end.",
    )
    command.add_argument("trace", type=Path, help="file that exit.trace named")
    command.add_argument("--thoughts", default="6", help="how many (default: 6)")
    command.add_argument("--out", type=Path, default=Path("out/exit-trace.png"), help="picture")
    command.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    most = read_whole("--thoughts", parsed.thoughts)
    probed = [thought for thought in read_trace(parsed.trace) if thought.probes]
    if not probed:
        raise BenchError(
            f"{parsed.trace} holds no probe, expected a trace of an engine with exit.eat on"
        )
    from meridian_patch.bench.exit_trace_plot import plot_thoughts

    chosen = sorted(probed, key=lambda thought: -len(thought.probes))[:most]
    caption = f"{len(chosen)} of {len(probed)} probed thoughts of {parsed.trace.name}"
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_bytes(plot_thoughts(chosen, caption))
    print(f"wrote {parsed.out}")
    return 0
