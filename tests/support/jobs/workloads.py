"""Requests for the tiny reasoner, as plain data, and what to read off their outputs."""

from meridian_patch.demo.problems import Problem, grade

THINK_END = "</think>"


def engine_arguments(model, **changes) -> dict:
    """Arguments of ``vllm.LLM`` for a small and quickly started engine."""
    return {
        "model": str(model),
        "dtype": "float32",
        "block_size": 32,
        "num_gpu_blocks_override": 129,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    } | changes


def ask(
    name: str,
    problem: Problem | str,
    *,
    earlier: tuple[str, str] | None = None,
    at_step: int = 0,
    priority: int = 0,
    **params,
):
    """One request: a greedy chat turn unless ``params`` say otherwise.

    Args:
        earlier: question and answer of the turn before, without its thinking.
    """
    question = problem if isinstance(problem, str) else problem.question
    roles = ("user", "assistant")
    history = [{"role": r, "content": c} for r, c in zip(roles, earlier or (), strict=False)]
    return {
        "name": name,
        "messages": [*history, {"role": "user", "content": question}],
        "params": {"temperature": 0, "max_tokens": 600} | params,
        "at_step": at_step,
        "priority": priority,
    }


def ask_all(prefix: str, problems: list[Problem], *, every_steps: int = 0, **params) -> list[dict]:
    """One request per problem, ``every_steps`` engine steps apart."""
    return [
        ask(f"{prefix}{index}", problem, at_step=index * every_steps, **params)
        for index, problem in enumerate(problems)
    ]


def sample(run: dict, name: str, index: int = 0) -> dict:
    return run["outputs"][name]["samples"][index]


def texts(run: dict) -> dict[str, list[str]]:
    """Request name -> the texts of its samples."""
    return {name: [s["text"] for s in out["samples"]] for name, out in run["outputs"].items()}


def token_ids(run: dict) -> dict[str, list[list[int]]]:
    """Request name -> the token ids of its samples."""
    return {name: [s["ids"] for s in out["samples"]] for name, out in run["outputs"].items()}


def graded(run: dict, problems: list[Problem], prefix: str) -> list[bool]:
    """Whether each problem of ``ask_all`` was answered right."""
    return [
        grade(sample(run, f"{prefix}{index}")["text"].partition(THINK_END)[2], problem.answer)
        for index, problem in enumerate(problems)
    ]


def preempted_phases(run: dict) -> list[str]:
    return [entry["phase"] for entry in run["preemptions"]]


def phases_after_prefill(run: dict, name: str) -> list[str]:
    """The phases the tracker put a request in; prefill is seen only if it took several steps."""
    phases = run["routed"][name]
    return phases[1:] if phases[0] == "prefill" else phases
