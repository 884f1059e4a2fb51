"""Draws a view at 80 columns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meridian_patch.operate.top.verdict import FULL
from meridian_patch.operate.top.view import View
from meridian_patch.operate.top.window import Latency, Quantile

WIDTH = 80
_BAR = 20
_PHASES = ("prefill", "think", "answer")
_GAPS = frozenset(("answer gap", "think gap", "next token"))
_HEIGHTS = "▁▂▃▄▅▆▇█"
_MOST_WINDOWS = 50
_CALM = frozenset(("none", "unknown"))


def render(shown: View, source: str, past: Sequence[View] = ()) -> Group:
    """The whole screen; the verdict comes first, since a low terminal shows the upper lines only.

    Args:
        shown: what to draw.
        source: the address or file that it is from.
        past: the windows of the last minute, ``shown`` among them, the oldest first; with fewer
            than two no history is drawn.
    """
    parts: list[RenderableType] = [
        _head(shown, source),
        _verdict(shown),
        _facts(shown),
        _latencies(shown.latencies),
    ]
    if len(past) > 1:
        parts.append(_history(past))
    return Group(*parts)


def _head(shown: View, source: str) -> Text:
    parts = [source, f"model {shown.model}" if shown.model else "", f"last {shown.window_s:.1f} s"]
    text = Text("meridian top  ", style="bold", no_wrap=True, overflow="ellipsis")
    return text.append("  ".join(filter(None, parts)), style="not bold")


def _facts(shown: View) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=10, style="dim")
    table.add_column()
    for name, value in _rows(shown):
        table.add_row(name, value)
    return table


def _rows(shown: View) -> Iterator[tuple[str, Text]]:
    load = shown.load
    if shown.is_reset:
        yield "note", Text("counters began anew: the server was restarted", style="yellow")
    if load.is_patched:
        phases = _counts({name: load.requests.get(name, 0) for name in _PHASES})
        yield "requests", Text(phases).append("   waiting ones included", style="dim")
    elif load.running is None:
        yield "requests", Text("unknown: this server has --disable-log-stats", style="yellow")
    else:
        yield "requests", Text("by phase unknown: this server runs stock vLLM", style="yellow")
    yield "batch", Text(f"running {_number(load.running)}   waiting {_number(load.waiting)}")
    yield "KV cache", _bar(load.kv_usage).append(f"   prefix hits {_share(shown.hit_share)}")
    rates = f"generated {_number(shown.generated_per_s)}   prompt {_number(shown.prompt_per_s)}"
    yield "tokens/s", Text(rates)
    if load.is_patched:
        preempted = Text(_counts(load.preemptions))
        if load.preemptions.get("answer"):
            preempted.stylize("bold red")
        yield "preempted", preempted
        yield "thoughts", Text("ended " + (_counts(_above_zero(shown.exits)) or "0"))
        yield "evicted", Text((_counts(_above_zero(shown.evictions)) or "0") + " blocks")
        yield "cache hits", Text((_counts(_above_zero(shown.hits)) or "0") + " tokens")


def _latencies(latencies: Mapping[str, Latency]) -> Table | Text:
    if not latencies:
        return Text("latency     no request began or ended in this window", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("latency", min_width=13)
    for name in ("mean", "p50", "p95", "stalls > 250 ms", "counted"):
        table.add_column(name, justify="right")
    for name, each in latencies.items():
        stalls = Text(_number(each.num_stalls) if name in _GAPS else "")
        if name == "answer gap" and each.num_stalls:
            stalls.stylize("bold red")
        quantiles = _quantile(each.p50), _quantile(each.p95)
        table.add_row(name, _time(each.mean_s), *quantiles, stalls, f"{each.count:,.0f}")
    return table


def _history(past: Sequence[View]) -> Table:
    past = past[-_MOST_WINDOWS:]
    seconds = sum(each.window_s for each in past)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"last {seconds:.0f} s", min_width=13)
    table.add_column("oldest to newest")
    table.add_column("most", justify="right")
    for name, value, text in _SERIES:
        told = (value(each) for each in past)
        values = [each if each is not None and isfinite(each) else None for each in told]
        known = [each for each in values if each is not None]
        if known:
            table.add_row(name, _bars(values, max(known)), text(max(known)))
    return table


def _bars(values: Sequence[float | None], most: float) -> str:
    """A column of one character for each value; a blank where there is none."""
    steps = len(_HEIGHTS) - 1
    scaled = (
        " " if value is None else _HEIGHTS[round(steps * max(value, 0) / most) if most > 0 else 0]
        for value in values
    )
    return "".join(scaled)


def _stalls(shown: View) -> float | None:
    gap = shown.latencies.get("answer gap")
    return gap.num_stalls if gap is not None else 0.0 if shown.load.is_patched else None


def _first_answer_s(shown: View) -> float | None:
    first = shown.latencies.get("first answer")
    return None if first is None else first.mean_s


def _verdict(shown: View) -> Group:
    verdict = shown.verdict
    style = "green" if verdict.bottleneck in _CALM else "bold yellow"
    first = Text(f"bottleneck: {verdict.bottleneck}", style=style)
    first.append(f" - {verdict.numbers}", style="not bold default")
    lines = [first]
    if verdict.change:
        lines.append(Text("change: ", style="bold").append(verdict.change, style="not bold"))
    return Group(*lines)


def _bar(share: float | None) -> Text:
    if share is None:
        return Text("use unknown")
    full = round(_BAR * min(1.0, max(0.0, share)))
    text = Text(f"{share:4.0%} ")
    text.append("#" * full, style="red" if share >= FULL else "green")
    return text.append("." * (_BAR - full), style="dim")


def _counts(counts: Mapping[str, float]) -> str:
    return "   ".join(f"{name} {count:,.0f}" for name, count in counts.items())


def _above_zero(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count > 0}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _quantile(value: Quantile) -> str:
    sign = {"at": "", "below": "< ", "above": "> "}[value.side]
    return sign + _time(value.seconds)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


# What the history shows: name, value of a window, and how a value is written.
_SERIES: Final[Sequence[tuple[str, Callable[[View], float | None], Callable[[float], str]]]] = (
    ("running", lambda shown: shown.load.running, _number),
    ("waiting", lambda shown: shown.load.waiting, _number),
    ("KV cache", lambda shown: shown.load.kv_usage, _share),
    ("answer stalls", _stalls, _number),
    ("first answer", _first_answer_s, _time),
)
