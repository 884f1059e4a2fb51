"""Negative controls: one changed line of ours each, which the simulator has to notice.

A mutant is applied to the source of its module before that is imported, in a process of its own;
where its text does not occur exactly once, it says so instead of passing by.
"""

import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STEPS = 250


class Mutant(NamedTuple):
    """One change.

    Attributes:
        module: below ``meridian_patch``.
        old, new: text that occurs once, and what stands there instead.
        seeds: within so many it must be noticed.
        fixed: axis values in which it can show at all, so that few seeds do.
    """

    name: str
    module: str
    old: str
    new: str
    seeds: int = 20
    fixed: dict[str, Any] = {}  # noqa: RUF012 - never changed


ENFORCE = {"exit": "enforce", "gap": 1, "strategy": "eat", "boundary": "token", "prefix": True,
           "cache": "dense", "connector": "none", "traffic": "thinkers"}  # fmt: skip
TIGHT = {"pool": "starving", "profile": "latency", "rule": "profile", "traffic": "thinkers",
         "boundary": "token", "queue": "fcfs", "connector": "none"}  # fmt: skip
# Faults of which each arm has its own number, so that times do not compare.
BUSY = {**TIGHT, **{f"fault_{name}": False for name in (
    "abort", "reset", "pause", "sleep", "late", "load_failure")}}  # fmt: skip
SHARED = {**TIGHT, "haste": "eager"}
TIERED = {**TIGHT, "tiers": True, "prefix": True, "cache": "dense"}

MUTANTS = (
    Mutant("probes that observe wait for ever", "engine.scheduler.policy_part",
           "and self._waited_steps < _MOST_WAITED_STEPS ", "",
           fixed={**ENFORCE, "exit": "observe", "graphs": 512, "pool": "ample", "length": 1536}),
    Mutant("budget not restored", "engine.scheduler.parts",
           "        scheduler.max_num_scheduled_tokens = budget\n", "        pass\n",
           fixed={**TIGHT, "budget": 2048}),
    Mutant("seats not restored", "engine.scheduler.parts",
           "        scheduler.max_num_active_reqs = active\n", "        pass\n",
           fixed={**TIGHT, "cache": "dense", "connector": "offload"}),
    Mutant("a displaced request is forgotten", "engine.scheduler.displacing",
           "        scheduler._preempt_request(\n",
           "        (lambda *a, **k: None)(\n", fixed=SHARED),
    Mutant("a displaced request keeps its place among those that run",
           "engine.scheduler.displacing",
           "        scheduler.running.remove(request)\n", "", fixed=SHARED),
    Mutant("a newcomer displaces its own level", "engine.scheduler.displacing",
           "self._service.level_of_thought(attained) <= level",
           "self._service.level_of_thought(attained) < level", fixed=SHARED, seeds=40),
    Mutant("a step's successor is popped", "engine.scheduler.step_timer",
           "            if noted.output is output:\n",
           "            if noted.output is not output:\n",
           fixed=TIGHT),
    Mutant("a step is timed from its scheduling", "engine.scheduler.step_timer",
           "now_s - max(noted.scheduled_s, before_s) +", "now_s - noted.scheduled_s +",
           fixed={**TIGHT, "flow": "async"}),
    Mutant("the first outliers are taken as they are", "policy.step_time",
           "np.where(off > limit, limit / np.maximum(off, 1e-12), 1.0)\n",
           "np.ones(len(off))\n",
           fixed={**TIGHT, "flow": "async", "fault_late": True}),
    Mutant("a policy that is switched off acts", "engine.scheduler.attained_service",
           "        if self.are_all:\n            return True\n", "",
           fixed={**TIGHT, "switch": True}),
    Mutant("early exit that is switched off acts", "engine.early_exit.part",
           "                watched.stop_acting()\n", "                pass\n",
           fixed={**ENFORCE, "switch": True}),
    Mutant("counts include probes", "engine.scheduler.scheduler",
           "        return counts if probes is None else probes.subtract_from(counts)\n",
           "        return counts\n", fixed=ENFORCE),
    Mutant("probes leave the engine", "engine.early_exit.part",
           "                    strip(results, ended)\n", "                    pass\n",
           fixed=ENFORCE),
    Mutant("requests that leave stay in the order", "engine.scheduler.phase_part",
           "        self._tracker.remove(request.request_id)\n", "        pass\n",
           fixed=TIGHT),
    Mutant("a close one token too late", "engine.early_exit.close",
           "        index = request.num_output_tokens + on_the_way - closing.begin\n",
           "        index = request.num_output_tokens + on_the_way - closing.begin - 1\n",
           fixed={**ENFORCE, "boundary": "framed"}),
    Mutant("a close counts no tokens on the way", "engine.early_exit.close",
           "max(min(counted, request.num_in_flight_tokens - num_scheduled), 0)", "0",
           fixed={**ENFORCE, "flow": "async", "boundary": "framed"}),
    Mutant("closes go on behind the thought", "engine.early_exit.part",
           "        self.forced_closes.end(watched)\n", "        pass\n", fixed=ENFORCE),
    Mutant("a probe that found no place stays in the queue", "engine.early_exit.probes",
           "        self._take_out(request)\n        # Load-bearing: requests",
           "        # Load-bearing: requests",
           fixed={**ENFORCE, "seats": 4, "pool": "starving"}, seeds=40),
    Mutant("a probe past the model's length", "engine.early_exit.probes",
           "        if prefix_tokens + len(self._suffix) + 1 > self._max_model_len:\n",
           "        if False:\n",
           fixed={**ENFORCE, "traffic": "runaways", "length": 192, "exit": "observe",
                  "boundary": "spelled"}),
    Mutant("a resumed answer still waits", "engine.request_state",
           "        self.waiting_answers.pop(state, None)\n", "        pass\n",
           fixed=TIGHT),
    Mutant("a paused session reads", "engine.request_state",
           "self.waiting_answers, self.answering, self.impatient,",
           "self.waiting_answers, self.impatient,",
           fixed={"traffic": "sessions", "connector": "none", "drafts": 0, "boundary": "token"}),
    Mutant("probes outlive their thought", "engine.early_exit.part",
           "        self.forced_closes.end(watched)\n        if self.probes is not None:\n"
           "            self.probes.cancel(watched)\n",
           "        self.forced_closes.end(watched)\n", fixed=ENFORCE),
    Mutant("an ended probe stays live", "engine.early_exit.probes",
           "        due = self.live.pop(name)\n", "        due = self.live[name]\n",
           fixed=ENFORCE),
    Mutant("a phase changes one token late", "phase.tracker",
           "is_changed |= self._match(state, token_id, index + 1)",
           "is_changed |= self._match(state, token_id, index + 2)", fixed=TIGHT),
    Mutant("thinking is counted twice", "phase.tracker",
           "            state.think_tokens_before += known - state.tokens_before\n",
           "            state.think_tokens_before += 2 * (known - state.tokens_before)\n",
           fixed={"boundary": "token", "traffic": "mixed"}, seeds=40),
    Mutant("the floor is not kept", "exit.thought_monitor",
           "        self._floor_tokens = int(min(config.min_think_tokens, self._most_tokens))\n",
           "        self._floor_tokens = 0\n", fixed={**ENFORCE, "strategy": "end_probability"}),
    Mutant("fences one tier off", "engine.kv_cache.free_queue",
           "            move_before(self._tier_ends[tier], first, last)\n",
           "            move_before(first, first, last)\n", fixed=TIERED),
    Mutant("passed fences are not put back", "engine.kv_cache.free_queue",
           "                link_before(following, node)\n", "                pass\n",
           fixed=TIERED),
    Mutant("fences count as blocks", "engine.kv_cache.free_queue",
           "        self.num_free_blocks += num_fences\n", "        pass\n", fixed=TIERED),
    Mutant("retention outlives the free", "engine.kv_cache.tiers",
           "        self._manager.end_free()\n", "        pass\n", fixed=TIERED),
    Mutant("finished requests' retention is kept", "engine.kv_cache.tiers",
           "            retention = self._finished.pop(request.request_id, None)\n",
           "            retention = self._finished.get(request.request_id)\n", fixed=TIERED),
    Mutant("readers stay when they leave", "engine.request_state",
           "                each.pop(state, None)\n", "                pass\n", fixed=TIGHT),
    Mutant("what was asked for is kept", "engine.request_state",
           "        state = self._states.pop(request.request_id, None)\n",
           "        state = self._states.get(request.request_id)\n",
           fixed={"traffic": "hostile"}),
    Mutant("prefill is served before answers", "policy.running_order",
           "    HANDOFF = 0\n", "    HANDOFF = 9\n", fixed=TIGHT, seeds=40),
    Mutant("thinkers stand before answers", "policy.running_order",
           "            return Standing.ANSWER\n", "            return Standing.PREFILL\n",
           fixed=TIGHT, seeds=40),
    Mutant("noop orders requests", "policy.profiles",
           "config.name in RULES[name].on_in",
           '(name == "order" or config.name in RULES[name].on_in)',
           fixed={"profile": "noop", "exit": "off", "boundary": "token", "rule": "profile",
                  "pool": "starving", "tiers": False}, seeds=40),
    Mutant("the order loses a request", "engine.scheduler.running_order",
           "        return (running if running == self._order else self._order.copy()), True\n",
           "        return (running if running == self._order else self._order[:-1]), True\n",
           fixed=TIGHT),
    Mutant("prompts crawl beside answers", "policy.prefill_budget",
           "        prefill = max(fitting, enough, owed)\n",
           "        prefill = least\n", fixed={**BUSY, "pool": "ample"}, seeds=40),
    Mutant("a request that is computed whole is kept", "engine.request_state",
           "if each is not self._states]\n",
           "if each is not self._states and each is not self.whole_waiting]\n",
           fixed={**TIGHT, "fields": "varied", "pool": "tight"}, seeds=60),
    Mutant("a step without prompts counts as one with", "engine.scheduler.scheduler",
           "plan.may_prefill = not is_throttled and not self._cadence.is_between_prefills()\n",
           "plan.may_prefill = True\n",
           fixed={**TIGHT, "cadence": 8, "machine": "slow", "pool": "ample"}, seeds=40),
    Mutant("tiers where rows of experts go with stock's order", "engine.kv_cache.tiers",
           "    if scheduler.aux_output_connector and not hasattr(\n",
           "    if False and not hasattr(\n",
           fixed={**TIERED, "experts": True, "traffic": "conversations", "seats": 4}, seeds=40),
    Mutant("of several tokens the last one alone is looked at", "phase.tracker",
           "        for index in range(seen, len(state.known)):\n",
           "        for index in range(len(state.known) - 1, len(state.known)):\n",
           fixed={**TIGHT, "drafts": 3, "drafter": "eagle", "seats": 4}),
    Mutant("the first boundary of a prompt decides", "phase.matcher",
           "                for index in range(stop - 1, start - 1, -1):\n",
           "                for index in range(start, stop):\n",
           fixed={**TIGHT, "stuffed": True}),
    Mutant("a hit keeps the block that a drafter reads again", "engine.kv_cache.shared_blocks",
           "    if drops_last_block(scheduler.kv_cache_manager):\n", "    if False:\n",
           fixed={**ENFORCE, "exit": "observe", "drafts": 2, "drafter": "eagle"}, seeds=40),
)  # fmt: skip


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from a changed source."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return compile(change(self.get_source(fullname) or "", self._mutant), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != f"meridian_patch.{self._mutant.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


def change(source: str, mutant: Mutant) -> str:
    """The source with the mutant's text in place.

    Raises:
        ValueError: the text does not occur exactly once.
    """
    number = source.count(mutant.old)
    if number != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: its text occurs {number} times in {mutant.module}, "
            "expected once"
        )
    return source.replace(mutant.old, mutant.new)


def source_of(mutant: Mutant) -> str:
    path = ROOT / "meridian_patch" / Path(*mutant.module.split("."))
    return path.with_suffix(".py").read_text()


def hunt(name: str, first: int, last: int, *, is_changed: bool) -> dict[str, Any]:
    """Run seeds until one fails; in a process of its own.

    Args:
        first, last: seeds, the last one excluded.
        is_changed: False runs the same cases on the code as it is.
    """
    (mutant,) = (each for each in MUTANTS if each.name == name)
    if is_changed:
        sys.meta_path.insert(0, _Finder(mutant))
    sys.path[:0] = [str(HERE), str(HERE.parent / "support" / "drivers")]
    from simulator.axes import Case, draw, repair
    from simulator.run import run_case

    steps = 0
    for seed in range(first, last):
        # Hooks that fail on purpose would hide what the mutant does.
        values = {**draw(seed, STEPS).values, "fault_raises": False, **mutant.fixed}
        result = run_case(Case(seed, STEPS, repair(values)))
        steps += result.steps
        if result.failures:
            invariant, text = next(iter(result.failures.items()))
            return {"seed": seed, "steps": steps, "invariant": invariant, "text": text}
    return {"seed": last, "steps": steps, "invariant": "", "text": ""}


def run(mutant: Mutant) -> dict[str, Any]:
    """What notices a mutant, in child processes; not what fails without it too."""
    change(source_of(mutant), mutant)
    first = 0
    while True:
        found = _in_child(mutant, first, mutant.seeds, is_changed=True)
        seed = found["seed"]
        if not found["invariant"]:
            return found
        control = _in_child(mutant, seed, seed + 1, is_changed=False)
        if not control["invariant"]:
            return found
        first = seed + 1


def _in_child(mutant: Mutant, first: int, last: int, *, is_changed: bool) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # noqa: TID251 - handed on
    request = json.dumps([mutant.name, first, last, is_changed])
    child = subprocess.run(
        [sys.executable, "-P", str(HERE / "mutants.py"), request],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if child.returncode:
        raise RuntimeError(f"mutant {mutant.name!r}: {child.stderr[-2000:]}")
    return dict(json.loads(child.stdout.splitlines()[-1]))


def main(only: Sequence[str], workers: int, page: Path | None) -> int:
    """Print the table of all mutants; 1 when one goes unnoticed."""
    chosen = [each for each in MUTANTS if not only or any(word in each.name for word in only)]
    began = time.monotonic()
    lines = [
        "| mutant | changed in | noticed by | after seeds | of at most |", "|---|---|---|---|---|"
    ]  # fmt: skip
    missed = []
    with ThreadPoolExecutor(workers) as pool:
        for mutant, found in zip(chosen, pool.map(run, chosen), strict=True):
            caught = found["invariant"] or "**nothing**"
            if not found["invariant"]:
                missed.append(mutant.name)
            lines.append(
                f"| {mutant.name} | {mutant.module} | {caught} | {found['seed'] + 1} | "
                f"{mutant.seeds} |"
            )
            print(f"{mutant.name}: {caught} after {found['seed'] + 1} seeds: {found['text'][:150]}",
                  file=sys.stderr)  # fmt: skip
    seconds = time.monotonic() - began
    share = f"{len(chosen) - len(missed)} of {len(chosen)}"
    lines += ["", f"{share} mutants were noticed, in {seconds:.0f} s."]
    text = "\n".join(lines) + "\n"
    if page:
        page.write_text(text)
    print(text)
    return bool(missed)


if __name__ == "__main__":
    name_, first_, last_, is_changed_ = json.loads(sys.argv[1])
    print(json.dumps(hunt(name_, first_, last_, is_changed=is_changed_)))
