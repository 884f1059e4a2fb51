"""Replays what an emulated server did, with the same cost model, and compares the two.

An emulated server and a replay have the scheduler, the requests, their tokens and the cost model in
common. What they differ by is the serving stack and this machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich.table import Table

from meridian_patch import envs
from meridian_patch.bench.figure_table import FIGURES
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.metrics import first_answer_index
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import ArmRun, SeedRun
from meridian_patch.bench.simulated.arms import arm_settings
from meridian_patch.bench.simulated.trace import History
from meridian_patch.emulation.device import EmulatedDevice
from meridian_patch.replay.types import EngineLimits, ReplayArm, ReplayRecord, ReplayRequest

# Figure and how far the two may be apart; None: no bar.
BARS: Mapping[str, float | None] = {
    "ttfat_mean_s": 0.05,
    "ttfat_p99_s": 0.05,
    "answer_itl_p50_s": 0.03,
    "answer_itl_p99_s": 0.03,
    "answer_gap_max_s": None,
    "tokens_per_s": 0.02,
    "preemptions": None,
}


@dataclass(frozen=True)
class Fidelity:
    """One figure of one arm, summed over seeds.

    Attributes:
        emulated, replayed: of the server, and of the replay.
        bar: how far the ratio may be from 1; None: no bar.
    """

    arm: str
    figure: str
    emulated: float
    replayed: float
    bar: float | None

    @property
    def error(self) -> float | None:
        """Emulated over replayed, less 1; None where the replay has nothing of it."""
        return self.emulated / self.replayed - 1 if self.replayed else None


def compare(
    run: ArmRun, environment: Mapping[str, str], settings: ServerSettings
) -> list[Fidelity]:
    """The figures of an arm's complete runs, emulated and replayed.

    Args:
        run: what the arm's server did.
        environment: of that server. An arm with a configuration file of its own is left out, for
            a replay closes no thought.
        settings: of that server.
    """
    if settings.device is None or "MERIDIAN_PATCH_CONFIG" in environment:
        return []
    seeds = [seed for seed in run.seeds if seed.is_complete]
    replayed = _replayed(seeds, _arm(run.name, environment), settings, settings.device)
    pairs = [(seed.figures(), again.figures()) for seed, again in zip(seeds, replayed, strict=True)]
    found = []
    for name, bar in BARS.items():
        values = [(ours[name], theirs[name]) for ours, theirs in pairs]
        both = [(ours, its) for ours, its in values if ours is not None and its is not None]
        if both:
            ours, its = (sum(column) for column in zip(*both, strict=True))
            found.append(Fidelity(run.name, name, ours / len(both), its / len(both), bar))
    return found


def fidelity_table(found: Sequence[Fidelity], how: str) -> Table:
    """A row per arm and figure; ``how`` says how the emulated ones were obtained."""
    title = f"{how}, against a replay of the same requests (simulated): means over seeds"
    table = Table("arm", "figure", "emulated", "replayed", "error", "bar", title=title)
    for each in found:
        kind = FIGURES[each.figure]
        table.add_row(
            each.arm,
            kind.title,
            *(f"{value * kind.scale:.4g}" for value in (each.emulated, each.replayed)),
            "-" if each.error is None else f"{each.error:+.1%}",
            "-" if each.bar is None else f"{each.bar:.0%}",
        )
    return table


def _replayed(
    seeds: Iterable[SeedRun], arm: ReplayArm, settings: ServerSettings, device: EmulatedDevice
) -> list[SeedRun]:
    """The same seeds in their order on one scheduler, for a policy learns from earlier requests."""
    # A report is written without vLLM, too.
    from meridian_patch.replay.engine import ReplayEngine
    from meridian_patch.replay.player import play
    from meridian_patch.replay.scheduler import read_template_tokens

    options = _options(settings)
    limits = EngineLimits(**{name: options[name] for name in EngineLimits.__annotations__})
    # Load-bearing: one block of a pool is the null block, which holds no tokens.
    blocks = options["num_gpu_blocks_override"] - 1
    engine = ReplayEngine(arm, blocks, device.step_seconds, read_template_tokens(), limits=limits)
    again = []
    for seed in seeds:
        engine.reset_prefix_cache()
        before = engine.totals.preemptions
        records = play(engine, _Recorded(seed, engine.now))
        by_id = {record.request.request_id: record for record in records}
        counted = {"preemptions": float(engine.totals.preemptions - before)}
        begin_s = min(r.arrival_s for r in records) - min(r.submit_s for r in _ended(seed))
        replayed = [_as_seen(record, by_id, begin_s) for record in _ended(seed)]
        again.append(replace(seed, records=replayed, counters=counted))
    return again


class _Recorded:
    """A source of a seed's requests at the times at which its clients sent them."""

    def __init__(self, seed: SeedRun, begin_s: float) -> None:
        self._arrivals = [
            (begin_s + record.submit_s, _request(record, seed.end_marker))
            for record in _ended(seed)
        ]

    def start(self) -> Iterable[tuple[float, ReplayRequest]]:
        return self._arrivals

    def follow(self, _record: ReplayRecord) -> Iterable[tuple[float, ReplayRequest]]:
        return ()


def _ended(seed: SeedRun) -> list[RequestRecord]:
    return [record for record in seed.records if record.finish_reason is not None]


def _request(record: RequestRecord, end_marker: tuple[int, ...]) -> ReplayRequest:
    output = list(record.token_ids)
    first = first_answer_index(output, end_marker)
    return ReplayRequest(
        record.request.id,
        list(record.prompt_ids),
        output,
        len(output) if first is None else first,
        max_tokens=record.request.max_tokens,
    )


def _as_seen(
    record: RequestRecord, replayed: Mapping[str, ReplayRecord], begin_s: float
) -> RequestRecord:
    token_s = [at_s - begin_s for at_s in replayed[record.request.id].token_s]
    return replace(record, token_s=token_s)


def _arm(name: str, environment: Mapping[str, str]) -> ReplayArm:
    settings = {n: v for n, v in environment.items() if n.startswith(envs.OVERRIDE_PREFIX)}
    arm = ReplayArm(name, envs.activation(environment) is True, settings)
    # Servers of kept thoughts say so in their own settings, which win.
    return replace(arm, settings=arm_settings(arm, History.STRIPPED))


def _options(settings: ServerSettings) -> dict[str, Any]:
    """VLLM's options with whole numbers, by name; the last of two equal ones."""
    options = settings.options
    return {
        name.removeprefix("--").replace("-", "_"): int(value)
        for name, value in pairwise(options)
        if name.startswith("--") and value.isdecimal()
    }
