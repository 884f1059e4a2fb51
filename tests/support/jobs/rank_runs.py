"""Plays a crowd on two engine cores in lock step, with the rule ``balance`` or without it."""

import time

from run_engine import PATCHED, Job, run_job
from tiny_models import make_tiny
from workloads import ask, engine_arguments

from meridian_patch.demo.problems import make_problems

PROBLEMS = make_problems(60, seed=31, steps=3)
ANSWERS = {"template": {"enable_thinking": False}}
SEATS = {
    "max_num_seqs": 3,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "data_parallel_size": 2,
    "async_scheduling": True,
}
OFF = {"BALANCE": "false", "TIME_BUDGET_US": "10000000"}
ON = OFF | {"BALANCE": "true"}
ARMS = {"off": OFF, "on": ON, "on again": ON, "off again": OFF}
ROUNDS = ("crowd 1", "crowd 2", "crowd 3")


def crowd(name):
    """More requests than both ranks have seats: long thinkers, short answers, some that leave.

    Each round asks something else, so none finds what an earlier one left in the cache.
    """
    asked, first = [], ROUNDS.index(name) * 18
    for number in range(18):
        problem = PROBLEMS[first + number]
        kind = number % 3
        tokens = (64, 24, 40)[kind]
        question = problem.question if kind else f"{name} {problem.question} " * 3
        one = ask(f"r{number}", question, max_tokens=tokens, ignore_eos=True)
        one["at_step"] = number * 2
        if kind:
            one |= ANSWERS
        if number % 8 == 6:
            one["leaves_after"] = 10
        asked.append(one)
    return {"name": name, "requests": asked, "events": []}


def interrupted():
    """One rank is idle; the engine is paused, put to sleep and woken under way."""
    asked = [
        ask(f"i{number}", PROBLEMS[number], max_tokens=40, ignore_eos=True) | {"rank": 0}
        for number in range(5)
    ]
    events = [
        {"do": "pause", "mode": "keep", "at_token": 30, "hold_s": 1},
        {"do": "sleep", "level": 0, "mode": "keep", "at_token": 100, "hold_s": 1},
    ]
    return {"name": "interrupted", "requests": asked, "events": events}


class RankArms:
    """One start of the engine for each arm that is asked for; 60 s on a quiet machine."""

    def __init__(self, reasoner, make_folder) -> None:
        self._model = make_tiny("moe", reasoner, make_folder("models"))
        self._make_folder = make_folder
        self._played: dict[str, dict] = {}

    def __getitem__(self, name: str) -> dict:
        """Runs, statuses and seconds of an arm."""
        if name not in self._played:
            changes = {f"MERIDIAN_PATCH_SET_POLICY__{k}": v for k, v in ARMS[name].items()}
            runs = [*map(crowd, ROUNDS), interrupted()]
            stage = {"name": "dp", "engine": engine_arguments(self._model, **SEATS), "runs": runs}
            job = Job(
                [stage], env=PATCHED | changes, allow_async=True, is_async=True, share_experts=True
            )
            began_s = time.monotonic()
            played = run_job(job, self._make_folder("dp"), 300)["stages"]["dp"]
            assert "error" not in played, played
            self._played[name] = played | {"seconds": time.monotonic() - began_s}
        return self._played[name]


def of_ranks(arm: dict, run: str, key: str) -> list[int]:
    """What each rank counted in one run."""
    return [core["ranks"][key] for core in arm["runs"][run]["cores"]]


def whole_tokens(arm: dict) -> dict[tuple[str, str], list[int]]:
    """Token ids of the requests whose clients stayed, by run and name."""
    return {
        (run, name): output["samples"][0]["ids"]
        for run, played in arm["runs"].items()
        for name, output in played["outputs"].items()
        if output["finished"]
    }


def figures(name: str, arm: dict) -> list[str]:
    """A row of a table for each round."""
    rows = []
    for run in ROUNDS:
        idle, steps, heard = (
            sum(of_ranks(arm, run, key)) for key in ("idle_steps", "steps", "heard_steps")
        )
        worst, played = max(of_ranks(arm, run, "worst_queue")), arm["runs"][run]
        speed = round(played["tokens"] / played["seconds"])
        cells = (name, run, idle, steps, speed, worst, heard)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


HEADER = (
    "| arm | round | idle-rank steps | steps | tokens/s | worst queue | steps with advice |\n"
    "|---|---|---|---|---|---|---|"
)
