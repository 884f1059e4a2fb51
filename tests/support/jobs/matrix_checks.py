"""What every cell of the compatibility matrix must show, stock engine against patched one."""

from dataclasses import dataclass

import pytest
from engine_watch import ANSWER
from matrix_record import running
from workloads import preempted_phases

STARTS_RANKS = pytest.mark.skipif(
    running() == "0.33",
    reason="vLLM 0.33 gives each data-parallel rank on a CPU a NUMA node of its own",
)


@dataclass(frozen=True)
class Pair:
    """One stage on a stock engine and on a patched one, and the patched one's log."""

    stock: dict
    patched: dict
    log: str = ""

    def runs(self, name: str) -> tuple[dict, dict]:
        for report in (self.stock, self.patched):
            assert "error" not in report, report.get("trace")
        return self.stock["runs"][name], self.patched["runs"][name]


def assert_same_outputs(stock: dict, patched: dict) -> int:
    """Token by token; of a request that was aborted, as far as both got.

    Returns:
        How many tokens were compared.
    """
    tokens = 0
    sides = (stock["outputs"], patched["outputs"])
    for name in set(sides[0]) ^ set(sides[1]):
        # It left while it waited for its first token.
        assert not any(side[name]["finished"] for side in sides if name in side), name
    for name in sorted(set(sides[0]) & set(sides[1])):
        wanted, got = (side[name] for side in sides)
        for one, other in zip(wanted["samples"], got["samples"], strict=True):
            both = min(len(one["ids"]), len(other["ids"]))
            is_whole = wanted["finished"] and got["finished"]
            assert wanted["finished"] == got["finished"], name
            upto = None if is_whole else both
            assert other["ids"][:upto] == one["ids"][:upto], name
            assert not is_whole or one["finish_reason"] == other["finish_reason"], name
            tokens += both
    return tokens


def assert_outputs_tell_contexts_apart(run: dict) -> None:
    """Or equal outputs would say little of the KV cache."""
    begins = {tuple(out["samples"][0]["ids"][:6]) for out in run["outputs"].values()}
    assert len(begins) > len(run["outputs"]) // 2
    varied = [len(set(out["samples"][0]["ids"])) for out in run["outputs"].values()]
    assert max(varied) > 8


def assert_healthy(run: dict) -> None:
    """No exception of ours, nothing left behind, phases as the tokens say."""
    fallbacks = {n: v for n, v in run["counted"].items() if n.startswith("fallback") and v}
    assert fallbacks == {}
    left = {name: run[name] for name in run if name.endswith("_left") and run[name]}
    assert left == {}
    assert run.get("kv_faults", []) == []
    assert run["misrouted"] == 0


def assert_works(pair: Pair, *, probes: bool = True, pressed: bool = True, run="crowd") -> str:
    """Outputs are stock's, our classes took part, thoughts were probed and the pool was short.

    Args:
        probes: whether EAT is on in this cell; if not, no probe may have been made.
        pressed: whether stock had to preempt.

    Returns:
        What the run showed, for the page.
    """
    stock, patched = pair.runs(run)
    assert not any("Phase" in name for name in pair.stock["scheduler"])
    assert any("PhaseSchedul" in name for name in pair.patched["scheduler"])
    assert pair.stock["status"] == []
    assert any(each["role"] == "engine_core" for each in pair.patched["status"])
    tokens = assert_same_outputs(stock, patched)
    assert_outputs_tell_contexts_apart(patched)
    assert_healthy(patched)
    assert bool(stock["preemptions"]) or not pressed
    if probes:
        assert patched["counted"]["probe:measured"] > 10
        assert patched["counted"].get("probe:lost", 0) == 0
    else:
        assert patched["probes"] == []
    return (
        f"{len(patched['outputs'])} requests, {tokens} tokens as stock; "
        f"{_preempted(patched)} (stock {_preempted(stock)})"
    )


def _preempted(run: dict) -> str:
    phases = preempted_phases(run)
    return f"preempted {len(phases)}, of these {phases.count(ANSWER)} answers"


def probed(pair: Pair, run: str = "crowd") -> str:
    """How many probes were measured, for the page."""
    return f"{pair.patched['runs'][run]['counted']['probe:measured']} measured"


def assert_cores_work(
    pair: Pair, *, number: int = 1, probing: int = 0, pressed: int = 0, run: str = "crowd"
) -> str:
    """The same of engine cores in processes of their own; what they saw is of all runs so far.

    Args:
        number: of engine cores.
        probing: the first engine core that probes thoughts.
        pressed: the first engine core that is short of blocks.
    """
    stock, patched = pair.runs(run)
    assert len(stock["cores"]) == len(patched["cores"]) == number
    tokens = assert_same_outputs(stock, patched)
    assert_outputs_tell_contexts_apart(patched)
    for core in stock["cores"]:
        assert not any("Phase" in name for name in core["scheduler"])
    assert all(core["preemptions"] for core in stock["cores"][pressed:])
    for index, core in enumerate(patched["cores"]):
        assert any("PhaseSchedul" in name for name in core["scheduler"])
        assert_healthy(core)
        assert core["counts"] == [0, 0]
        assert (core["counted"].get("probe:measured", 0) > 10) == (index >= probing)
        assert core["counted"].get("probe:lost", 0) == 0
    streams = [out for out in patched["outputs"].values() if out["finished"]]
    assert any(out["pieces"] > len(out["samples"][0]["ids"]) // 2 for out in streams)
    return f"{len(patched['outputs'])} streaming clients, {tokens} tokens as stock"


def measured(pair: Pair, run: str = "crowd") -> str:
    """How many probes all engine cores measured up to the end of a run, for the page."""
    cores = pair.patched["runs"][run]["cores"]
    return f"{sum(core['counted'].get('probe:measured', 0) for core in cores)} measured"
