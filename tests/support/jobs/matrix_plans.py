"""The engines and requests of the compatibility matrix, as plain data.

Every cell has all defaults on: latency policy, KV tiers, early exit observing, here with a probe at
every paragraph and at least every few tokens. Every crowd has thinkers, answers and aborts in a KV
pool too small for them.
"""

from pathlib import Path

from run_engine import Job
from workloads import ask, engine_arguments

from meridian_patch.demo.problems import make_problems

# A decision dropped because this machine was busy would make the result depend on the machine.
ALL_ON = {
    "MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "10000000",
    "MERIDIAN_PATCH_SET_EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "MERIDIAN_PATCH_SET_EXIT__PROBE_MAX_GAP_TOKENS": "5",
    "MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS": "all",
}
PRESSED = {
    "num_gpu_blocks_override": 11,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}
ANSWERS = {"template": {"enable_thinking": False}}
PROBLEMS = make_problems(16, seed=21, steps=3)
END_ID = 259
BIAS = {"65": 2.0, "66": -100}


def crowd(
    length: int = 110, every_steps: int = 4, *, has_bias: bool = True, problems=PROBLEMS, **more
) -> dict:
    """A run: thinkers, answers among them, some with wishes of their own, and two that leave.

    Args:
        length: tokens of each thinker.
        every_steps: engine steps between two arrivals.
        has_bias: some ask for other logits.
        problems: what they ask, 13 at least.
        more: of every request.
    """
    free = {"ignore_eos": True}
    asked = [ask(f"thinker{n}", problems[n], max_tokens=length, **free) for n in range(5)]
    asked += [ask(f"leaver{n}", problems[5 + n], max_tokens=length, **free) for n in range(2)]
    answers = length * 2 // 3
    asked += [
        ask(f"answer{n}", problems[7 + n], max_tokens=answers, **free) | ANSWERS for n in range(3)
    ]
    asked += [
        ask("biased", problems[10], max_tokens=answers, logit_bias=BIAS, **free),
        ask("floored", problems[11], max_tokens=answers, min_tokens=20, logit_bias={END_ID: 3.0}),
        ask("hurried", problems[12], max_tokens=answers, extra_args={"meridian_itl_ms": 50.0})
        | ANSWERS,
    ]
    if not has_bias:
        for request in asked:
            request["params"].pop("logit_bias", None)
    # Not by kind: thinkers come first and last.
    order = sorted(range(len(asked)), key=lambda n: (n * 5) % len(asked))
    for place, number in enumerate(order):
        asked[number] |= {"at_step": place * every_steps} | more
    leaves = {r["name"]: r["at_step"] + 30 for r in asked if r["name"].startswith("leaver")}
    aborts = [{"do": "abort", "names": [name], "at_step": at} for name, at in leaves.items()]
    return {"name": "crowd", "requests": asked, "events": aborts}


def cell(name: str, model: Path, runs: list[dict] | None = None, **engine) -> dict:
    """One engine of the matrix, as a stage of a job."""
    arguments = engine_arguments(model, **PRESSED | engine)
    return {"name": name, "engine": arguments, "runs": runs or [crowd()], "may_fail": True}


def matrix_job(stages: list[dict], env: dict[str, str], **job) -> Job:
    """A job of cells, stock or patched by its environment."""
    return Job(stages, env=env, allow_async=True, **job)


def streaming_crowd(length: int = 110) -> dict:
    """The crowd as streaming clients: two close their streams in the middle."""
    run = crowd(length)
    for request in run["requests"]:
        if request["name"].startswith("leaver"):
            request["leaves_after"] = 30
    return run | {"events": []}


def session(number: int) -> dict:
    """A session of two turns; the second comes while the first's tokens still do, or behind."""
    turns = [
        {"text": f"<think>\n{PROBLEMS[number].question}", "max_tokens": 30, "after_tokens": 0},
        {"text": f"and {number}</think>", "max_tokens": 20, "after_tokens": (5, 30, 30)[number]},
    ]
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 30}
    return {"name": f"session{number}", "turns": turns, "params": params, "at_step": number}
