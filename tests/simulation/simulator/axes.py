"""What a simulated configuration may be: the axes, their values, and how a seed draws them."""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from short_thoughts import NAMES

from meridian_patch.config.policy import RULES


class Axis(NamedTuple):
    """One thing that can be configured.

    Attributes:
        plain: the value that switches the feature off, or makes it ordinary.
        values: all values, the plain one included.
        weights: how often each value is drawn; None: equally often.
    """

    plain: Any
    values: tuple[Any, ...]
    weights: tuple[float, ...] | None = None


BOUNDARY_KINDS = (
    "token", "framed", "spelled", "several", "overlapping", "channel", "unprobed", "none",
)  # fmt: skip
TRAFFIC = (
    "mixed", "thinkers", "plain", "agents", "conversations", "sessions", "runaways",
    "pool_prompts", "hostile", "siblings",
)  # fmt: skip
# Of most cases, and of those that axis `scale` makes large.
MOST_SEATS, WIDE_SEATS, WIDEST_SEATS = 64, 256, 1024
LONGEST, LONG = 1536, 131_072
FAULTS = (
    "abort", "reset", "pause", "sleep", "lost_probe", "raises", "nan", "late", "empty",
    "load_failure",
)  # fmt: skip

AXES: dict[str, Axis] = {
    "flow": Axis("sync", ("sync", "async", "pp2", "pp3", "pp4", "pp2-async"), (3, 4, 1, 1, 1, 1)),
    "runner": Axis("v1", ("v1", "v2")),
    "cache": Axis("dense", ("dense", "window", "hybrid"), (6, 2, 2)),
    "chunked": Axis(True, (True, False), (4, 1)),
    "long_prefill": Axis(0, (0, 64), (3, 1)),
    "images": Axis("none", ("none", "chunked", "whole"), (4, 1, 1)),
    "encoder": Axis("ample", ("ample", "scarce")),
    "block": Axis(32, (16, 32, 64)),
    "prefix": Axis(True, (True, False), (8, 1)),
    "drafts": Axis(0, (0, 1, 2, 3, 4, 5), (5, 1, 1, 1, 1, 1)),
    "queue": Axis("fcfs", ("fcfs", "priority"), (4, 1)),
    "seats": Axis(16, (2, 4, 8, 16, MOST_SEATS, WIDE_SEATS, WIDEST_SEATS), (1, 2, 2, 3, 1, 0, 0)),
    "budget": Axis(512, (64, 128, 512, 2048)),
    "pool": Axis("ample", ("starving", "tight", "ample")),
    "length": Axis(512, (192, 512, LONGEST, LONG), (2, 3, 2, 0)),
    "grammar": Axis("never", ("never", "behind", "within"), (4, 1, 1)),
    "lora": Axis("none", ("none", "scarce"), (3, 1)),
    "connector": Axis("none", ("none", "load", "delayed", "offload"), (9, 1, 1, 1)),
    "profile": Axis("latency", ("latency", "noop"), (4, 1)),
    "rule": Axis("profile", ("profile", *RULES), (6, *[1] * len(RULES))),
    "machine": Axis("slow", ("slow", "fast")),
    "haste": Axis("default", ("default", "eager")),
    "exit": Axis("off", ("off", "observe", "enforce"), (1, 2, 2)),
    "gap": Axis(64, (1, 4, 64), (2, 1, 1)),
    "strategy": Axis("eat", NAMES, (6, *[1] * (len(NAMES) - 1))),
    "tiers": Axis(True, (True, False), (4, 1)),
    "history": Axis("strip", ("strip", "keep", "keep_in_tool_loop"), (3, 1, 1)),
    "boundary": Axis("token", BOUNDARY_KINDS, (6, 1, 1, 1, 1, 1, 1, 1)),
    "traffic": Axis("mixed", TRAFFIC, (4, 1, 2, 1, 1, 1, 1, 1, 1, 1)),
    **{f"fault_{name}": Axis(False, (False, True), (4, 1)) for name in FAULTS},
    "wrap_up": Axis(False, (False, True), (2, 1)),
    "drafter": Axis("ngram", ("ngram", "eagle", "mtp"), (2, 1, 1)),
    "cadence": Axis(1, (1, 2, 8), (6, 1, 1)),
    "reserve": Axis(True, (True, False), (5, 1)),
    "events": Axis(False, (False, True), (4, 1)),
    "dcp": Axis(1, (1, 2), (6, 1)),
    "fields": Axis("plain", ("plain", "varied"), (3, 1)),
    "stuffed": Axis(False, (False, True), (6, 1)),
    "scale": Axis("small", ("small", "wide", "deep", "long"), (45, 1, 1, 1)),
    "experts": Axis(False, (False, True), (8, 1)),
    # Last, so that older seeds keep their other values.
    "switch": Axis(False, (False, True), (6, 1)),
    # Most tokens of a step that a captured graph runs; any prompt in a step makes it longer then.
    "graphs": Axis(None, (None, 128, 512), (4, 1, 1)),
}
"""Every axis by name."""


@dataclass(frozen=True)
class Case:
    """A configuration, and the seed of its workload and its faults.

    Attributes:
        values: by axis.
        steps: during which requests arrive.
    """

    seed: int
    steps: int
    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def is_async(self) -> bool:
        return self.flow.endswith("async")

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return int(self.flow[2]) if self.flow.startswith("pp") else 1

    def has_fault(self, name: str) -> bool:
        return bool(self.values[f"fault_{name}"])

    def with_value(self, axis: str, value: Any) -> "Case":
        """The same with another value of one axis, as far as the others allow it."""
        return Case(self.seed, self.steps, repair({**self.values, axis: value}))

    @property
    def num_odd(self) -> int:
        """How many axes are not plain."""
        return sum(value != AXES[name].plain for name, value in self.values.items())

    def describe(self) -> str:
        """The values that are not plain."""
        odd = {name: v for name, v in self.values.items() if v != AXES[name].plain}
        return ", ".join(f"{name}={value}" for name, value in odd.items()) or "all plain"


def draw(seed: int, steps: int, **fixed: Any) -> Case:
    """The case of a seed, with some values given instead of drawn."""
    rng = random.Random(f"axes {seed}")
    values = {
        name: rng.choices(axis.values, weights=axis.weights)[0] for name, axis in AXES.items()
    }
    return Case(seed, steps, repair({**values, **fixed}))


def repair(values: dict[str, Any]) -> dict[str, Any]:
    """Values that vLLM takes together; what cannot be is made plain or moved to the next value."""
    new = dict(values)
    for part in (
        _repair_scale, _repair_experts, _repair_pipeline, _repair_drafter, _repair_cache,
        _repair_budget, _repair_traffic, _repair_exit,
    ):  # fmt: skip
        part(new)
    return new


def _repair_scale(new: dict[str, Any]) -> None:
    if new["scale"] == "wide":
        # What was drawn is a small number: 2 and 4 become the most.
        seats = WIDEST_SEATS if new["seats"] <= 4 or new["seats"] == WIDEST_SEATS else WIDE_SEATS
        new.update(seats=seats, budget=2048, pool="ample")
    elif new["scale"] == "long":
        new.update(length=LONG, budget=2048, seats=min(new["seats"], 8))
        new.update(block=64, pool="tight")
    else:
        new["seats"] = min(new["seats"], MOST_SEATS)
        new["length"] = min(new["length"], LONGEST)


def _repair_experts(new: dict[str, Any]) -> None:
    """What vLLM refuses beside ``--enable-return-routed-experts``."""
    if new["experts"]:
        new.update(runner="v2", prefix=True, dcp=1, connector="none")
        # Load-bearing: its store keeps the rows of all requests that have not ended, in as much
        # room as the pool has: where many are preempted it ends the engine, in stock too. So it
        # does, asynchronously, where the prefix cache is reset, the engine pauses or a session's
        # next turn begins while a step is in flight.
        new.update(pool="ample", fault_reset=False, fault_pause=False)
        new["traffic"] = "mixed" if new["traffic"] == "sessions" else new["traffic"]
        if new["flow"].startswith("pp"):
            new["flow"] = "async" if new["flow"].endswith("async") else "sync"


def _repair_drafter(new: dict[str, Any]) -> None:
    if not new["drafts"]:
        new["drafter"] = "ngram"
    elif new["drafter"] == "ngram" and new["flow"].endswith("async"):
        # Load-bearing: vLLM schedules asynchronously with drafters on the GPU alone.
        new["drafter"] = "eagle"
    if new["drafter"] != "ngram":
        # What a drafter of hidden states reads of states at block borders, the CPU build cannot.
        new["cache"] = "dense" if new["cache"] == "hybrid" else new["cache"]


def _repair_pipeline(new: dict[str, Any]) -> None:
    if new["flow"] == "pp2-async":
        new["runner"] = "v2"
    if new["flow"].startswith("pp"):
        # Load-bearing: vLLM 0.32 counts the adapters of scheduled requests alone, and under
        # pipeline parallelism not all that run are scheduled: it fails by an assertion.
        new["lora"] = "none"


def _repair_cache(new: dict[str, Any]) -> None:
    if new["cache"] == "hybrid":
        # States at block borders need prefix caching and chunks.
        new.update(prefix=True, chunked=True, connector="none")
        new["block"] = min(new["block"], new["budget"], 32)
        # Load-bearing: vLLM aligns chunks to such blocks, and refuses to keep images whole as well.
        new["images"] = "chunked" if new["images"] == "whole" else new["images"]
    if new["cache"] != "dense" or new["connector"] != "none":
        # Load-bearing: vLLM splits the context of full attention alone.
        new["dcp"] = 1
    if new["connector"] == "offload":
        if new["cache"] == "dense":
            new["prefix"] = True
        else:
            new["connector"] = "none"
    if new["connector"] != "load":
        new["fault_load_failure"] = False


def _repair_budget(new: dict[str, Any]) -> None:
    if not new["chunked"]:
        new.update(budget=2048, long_prefill=0)
    # A step must have a token for each seat, its drafts included.
    while new["seats"] * (1 + new["drafts"]) > new["budget"]:
        new["seats"] = max(seats for seats in AXES["seats"].values if seats < new["seats"])
    if new["images"] == "none":
        new["encoder"] = "ample"


def _repair_traffic(new: dict[str, Any]) -> None:
    if new["traffic"] != "sessions":
        return
    if new["connector"] != "none" or new["drafts"]:
        new["traffic"] = "mixed"
    elif new["pool"] == "starving":
        # A paused session holds its blocks: vLLM has none for other requests then.
        new["pool"] = "tight"


def _repair_exit(new: dict[str, Any]) -> None:
    if new["boundary"] == "none":
        new.update(history="strip", exit="off")
        if new["grammar"] == "behind":
            new["grammar"] = "within"
    if new["exit"] == "off":
        new.update(strategy="eat", fault_lost_probe=False, fault_nan=False, gap=64, wrap_up=False)
    elif new["strategy"] != "eat":
        new.update(fault_lost_probe=False, gap=64)
