"""The engine jobs that the tests in ``tests/engine`` share, as plain data.

Stock and patched engines run the same stages; a job is started once per test run and many tests
read its result.
"""

from pathlib import Path

from run_engine import Job
from workloads import ask, ask_all, engine_arguments

from meridian_patch.demo.problems import make_problems

# A decision dropped because this machine was busy would make the result depend on the machine.
PATIENT = {"MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "10000000"}
# Nothing that decides, probes or measures.
NOOP = {
    "MERIDIAN_PATCH_SET_POLICY__NAME": "noop",
    "MERIDIAN_PATCH_SET_EXIT__MODE": "off",
}
# In the default mode, observe: many probes, as the tiny reasoner's thoughts are short.
PROBING = {
    "MERIDIAN_PATCH_SET_EXIT__PROBE_MIN_GAP_TOKENS": "8",
    "MERIDIAN_PATCH_SET_EXIT__PROBE_MAX_GAP_TOKENS": "12",
    "MERIDIAN_PATCH_SET_EXIT__PROBE_EVERY_STEPS": "1",
}

AMPLE = make_problems(3, seed=6, steps=4)
# Room for the ample requests, and for about half of what the pressure requests grow to.
SMALL_POOL = 37
# Long thinkers first, then short problems whose answers come while the long ones still think.
PRESSURE = make_problems(6, seed=5, steps=6) + make_problems(12, seed=5, steps=2)
PRESSURE_V2 = make_problems(2, seed=5, steps=5) + make_problems(4, seed=5, steps=2)
LONG_QUESTION = "Here is a long introduction that says nothing at all. " * 6 + AMPLE[0].question
SHORT_QUESTION = LONG_QUESTION[-150:]
REGEX = "[0-9] it is, and nothing else\\."


def v1_job(model: Path, env: dict[str, str], *, pressure_only: bool = False) -> Job:
    """Model Runner V1: every feature on the synchronous and the asynchronous path."""
    small = {
        "num_gpu_blocks_override": SMALL_POOL,
        "max_model_len": 1024,
        "max_num_batched_tokens": 64,
    }
    runs = [*([] if pressure_only else FEATURE_RUNS), turns_run(), PRESSURE_RUN]
    stages = [
        _stage("sync", runs, engine_arguments(model, **small, async_scheduling=False)),
        _stage("async", runs, engine_arguments(model, **small, async_scheduling=True)),
    ]
    if not pressure_only:
        priority = {"scheduling_policy": "priority", "max_num_seqs": 2}
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
        stages += [
            _stage(
                "priority",
                [PRIORITY_RUN, STRUCTURED_RUN],
                engine_arguments(model, **priority, reasoning_parser="deepseek_r1"),
            ),
            _stage(
                "ngram", [AMPLE_RUN, OFF_RUN], engine_arguments(model, speculative_config=ngram)
            ),
        ]
    return Job(stages, env=env, allow_async=True)


def v2_job(model: Path, env: dict[str, str]) -> Job:
    """Model Runner V2, asynchronous as on a GPU; short, for the interpreter is slow."""
    engine = engine_arguments(
        model,
        num_gpu_blocks_override=18,
        max_model_len=512,
        max_num_batched_tokens=64,
        async_scheduling=True,
    )
    ample = {"name": "ample", "requests": ask_all("a", AMPLE[:2], max_tokens=60)}
    pressure = {
        "name": "pressure",
        "requests": ask_all("p", PRESSURE_V2, every_steps=10, max_tokens=260),
    }
    off = _off_run(AMPLE[:1], max_tokens=40)
    turns = turns_run(question=SHORT_QUESTION, fillers=2, every_steps=215, max_tokens=210)
    stages = [_stage("async", [ample, off, _abort_run(max_tokens=60), turns, pressure], engine)]
    return Job(stages, env=env, allow_async=True, model_runner_v2=True)


def turns_run(
    question: str = LONG_QUESTION, fillers: int = 3, every_steps: int = 270, max_tokens: int = 260
) -> dict:
    """A conversation whose second turn comes after thinkers that fill the pool, one by one."""
    last = 20 + fillers * every_steps + max_tokens + 20
    thinkers = make_problems(fillers, seed=8, steps=6)
    return {
        "name": "turns",
        "requests": [
            ask("first", question, max_tokens=12, at_step=1),
            *[
                ask(f"t{i}", problem, at_step=20 + i * every_steps, max_tokens=max_tokens)
                for i, problem in enumerate(thinkers)
            ],
            ask("next", AMPLE[1], earlier=(question, "1"), at_step=last, max_tokens=12),
        ],
        "events": [{"do": "reset_prefix_cache", "reset_running_requests": False}],
    }


def _stage(name: str, runs: list[dict], engine: dict) -> dict:
    return {"name": name, "runs": runs, "engine": engine}


def _abort_run(max_tokens: int) -> dict:
    return {
        "name": "abort",
        "requests": ask_all("a", AMPLE, max_tokens=max_tokens),
        "events": [{"do": "abort", "names": ["a1"], "at_step": 30}],
    }


def _off_run(problems: list, max_tokens: int) -> dict:
    """Requests that want no early exit, after those that had what is configured."""
    off = {"meridian_exit": "off"}
    return {
        "name": "off",
        "requests": ask_all("a", problems, max_tokens=max_tokens, extra_args=off),
        "events": [{"do": "reset_prefix_cache", "reset_running_requests": False}],
    }


OFF_RUN = _off_run(AMPLE, max_tokens=300)
AMPLE_RUN = {"name": "ample", "requests": ask_all("a", AMPLE, max_tokens=300)}
PRESSURE_RUN = {"name": "pressure", "requests": ask_all("p", PRESSURE, every_steps=12)}
FEATURE_RUNS = [
    AMPLE_RUN,
    OFF_RUN,
    {"name": "chunked", "requests": [ask("c", LONG_QUESTION, max_tokens=40)]},
    # The same prompt again, now from the prefix cache.
    {"name": "cached", "requests": [ask("c", LONG_QUESTION, max_tokens=40)]},
    {
        "name": "reset_idle",
        "requests": [ask("c", LONG_QUESTION, max_tokens=40, at_step=1)],
        "events": [{"do": "reset_prefix_cache", "reset_running_requests": False}],
    },
    {
        "name": "reset_running",
        "requests": ask_all("a", AMPLE, max_tokens=300),
        "events": [{"do": "reset_prefix_cache", "reset_running_requests": True, "at_step": 60}],
    },
    # Unseeded: seeded sampling fails with chunked prefill on the CPU build.
    {"name": "samples", "requests": [ask("n", AMPLE[0], n=4, temperature=1.0, max_tokens=150)]},
    _abort_run(max_tokens=300),
    {
        "name": "pause",
        "requests": ask_all("a", AMPLE, max_tokens=300),
        "events": [
            {"do": "pause", "at_step": 40},
            # What was in flight when the pause came is still delivered.
            {"do": "observe", "at_step": 44},
            {"do": "observe", "at_step": 70},
            {"do": "resume", "at_step": 71},
        ],
    },
]
PRIORITY_RUN = {
    "name": "priority",
    "requests": [
        ask(f"r{priority}", problem, priority=priority, max_tokens=60)
        for priority, problem in zip((5, 4, 3, 2, 1), make_problems(5, seed=2), strict=True)
    ],
}
STRUCTURED_RUN = {
    "name": "structured",
    "requests": [ask("s", PRESSURE[-1], regex=REGEX, max_tokens=300)],
}
