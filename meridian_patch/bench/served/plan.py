"""Turns options into a served comparison: its model, servers, arms and traces."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from rich.console import Console

from meridian_patch import envs
from meridian_patch.bench.arms import override
from meridian_patch.bench.options import WHOLE, read_positive, read_seeds, read_whole
from meridian_patch.bench.served.arms import ServedArm, read_arms
from meridian_patch.bench.served.capacity import CAPACITY_SHARE, bearable_rate
from meridian_patch.bench.served.load import Load
from meridian_patch.bench.served.run import Comparison, check_ports
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.workload import (
    TURNS,
    Mix,
    Pause,
    ServedRequest,
    Turns,
    make_conversations,
    make_mixed,
    make_trace,
    read_trace,
)
from meridian_patch.config.validate import shown
from meridian_patch.emulation.device import EmulatedDevice, check_machine, load_device
from meridian_patch.emulation.options import MOST_SEQS
from meridian_patch.engine import model_files
from meridian_patch.engine.device import accelerator_name
from meridian_patch.errors import BenchError

FIRST_SEED = 11
DEFAULT_PAIRS = "5"
# Of the tiny reasoner's servers: KV pool in blocks, and context in tokens.
SIZES = {"problems": (96, 2048), "turns": (224, 4096), "mixed": (72, 2048)}
_REQUESTS = {"problems": "160", "turns": "96", "mixed": "20"}
# Per second; of turns, conversations. Mixed ones come at once, later turns after the answer.
_RATES = {"problems": "8", "turns": "0.7", "mixed": "2000"}
_PAUSE_S = "4"
# Of conversations beside single problems: their prompts stay within the context.
_MIXED_TURNS = (2, 3)
_MIXED_HARD_SHARE = 0.5
# The CPU build wants a multiple of 32.
_BLOCK_SIZE = 32
_HIGHEST_PORT = 65535
_KEEPING_TEMPLATE = "chat_template_keep_thinking.jinja"


def plan_comparison(parsed: argparse.Namespace, command: str, console: Console) -> Comparison:
    """The comparison that the options of ``meridian bench serve`` ask for.

    Args:
        parsed: the options, as ``command.add_serve`` declares them.
        command: as typed.
        console: shows progress while ``--rate auto`` measures what stock completes.

    Raises:
        BenchError: a wrong option, or stock failed.
    """
    arms = read_arms(parsed.arms, parsed.arm, envs.environment())
    blocks = read_whole("--blocks", parsed.blocks) if parsed.blocks is not None else None
    extra = _serve_args(parsed.serve_args)
    sizes, device = SIZES[parsed.workload], _device(parsed)
    settings = any_settings(find_model(parsed.model), blocks, extra, sizes, device)
    _check_ample(arms, settings)
    if parsed.history == "kept" and settings.model == packaged_model():
        arms, settings = _keeping_thoughts(arms, settings)
    load = Load(
        processes=read_whole("--clients", parsed.clients),
        request_limit_s=read_positive("--request-limit", parsed.request_limit),
        end_marker="" if parsed.history == "plain" else parsed.end_marker,
        history=parsed.history,
    )
    port, seeds, pause = _port(parsed.port, len(arms)), _seeds(parsed), _pause(parsed)
    if parsed.trace is not None:
        trace = read_trace(parsed.trace)
        traces: dict[int, Sequence[ServedRequest]] = dict.fromkeys(seeds, trace)
        words = f"{len(trace)} requests from {parsed.trace}."
    else:
        requests = read_whole("--requests", parsed.requests or _REQUESTS[parsed.workload])
        why = ""
        if parsed.rate == "auto":
            check_ports(port, len(arms))
            rate, why = bearable_rate(settings, load, CAPACITY_SHARE, parsed.out, console)
            if parsed.workload == "turns":
                rate = round(rate / fmean(TURNS), 3)
        else:
            rate = read_positive("--rate", parsed.rate or _RATES[parsed.workload])
        draw, words = _workload(parsed.workload, requests, rate, pause)
        traces = {seed: draw(seed) for seed in seeds}
        words = f"{words} {why}".strip()
    return Comparison(
        arms=arms,
        settings=settings,
        traces=traces,
        workload=words,
        load=load,
        port=port,
        folder=parsed.out,
        command=command,
        restarts=parsed.restart,
        starts_together=settings.model == packaged_model() and accelerator_name() is None,
        headlines_only=parsed.headlines,
        has_fidelity=_has_fidelity(parsed, settings),
        pauses_in_tokens=pause.unit == "tokens" and _has_later_turns(traces),
    )


def _device(parsed: argparse.Namespace) -> EmulatedDevice | None:
    """The device that the servers emulate."""
    if parsed.emulate is None:
        return None
    check_machine(is_allowed_beside_gpu=parsed.emulate_beside_gpu)
    if (accelerator := accelerator_name()) is not None:
        raise BenchError(
            f"--emulate {parsed.emulate}: this vLLM runs on {accelerator}, and only its CPU build "
            "can emulate (scripts/setup --cpu puts it into .venv in place of this one); the demo "
            "runs on the GPU with --bare"
        )
    return load_device(parsed.emulate, parsed.emulate_tokens)


def _has_fidelity(parsed: argparse.Namespace, settings: ServerSettings) -> bool:
    if parsed.fidelity and (settings.device is None or settings.model != packaged_model()):
        raise BenchError(
            "--fidelity replays what emulated servers of the tiny reasoner did; give --emulate "
            "DEVICE, and no --model"
        )
    return bool(parsed.fidelity)


def _pause(parsed: argparse.Namespace) -> Pause:
    """How long it takes from an answer to the next turn."""
    given = [name for name in ("pause", "pause_tokens") if getattr(parsed, name) is not None]
    if given and parsed.trace is not None:
        raise BenchError(
            "--pause and --pause-tokens draw traces and --trace gives one; leave out one"
        )
    if len(given) > 1:
        raise BenchError("--pause is in seconds and --pause-tokens in tokens; give one of them")
    if parsed.pause_tokens is not None:
        return Pause(read_positive("--pause-tokens", parsed.pause_tokens), "tokens")
    return Pause(read_positive("--pause", _PAUSE_S if parsed.pause is None else parsed.pause))


def _has_later_turns(traces: Mapping[int, Sequence[ServedRequest]]) -> bool:
    return any(request.follows for trace in traces.values() for request in trace)


def _workload(
    name: str, requests: int, rate: float, pause: Pause
) -> tuple[Callable[[int], list[ServedRequest]], str]:
    """How a trace is drawn from a seed, and the workload in words.

    Args:
        name: one of ``command.WORKLOADS``.
        requests: per trace.
        rate: requests per second; of ``turns``, conversations per second.
        pause: from an answer to the next turn.
    """
    if name == "turns":
        turns = Turns(requests, rate, pause)
        return partial(make_conversations, turns), str(turns)
    if name == "problems":
        mix = Mix(requests, rate)
        return partial(make_trace, mix), str(mix)
    half = requests // 2
    mix = Mix(requests - half, rate / 2, history_share=0.0, hard_share=_MIXED_HARD_SHARE)
    of_conversations = rate / 2 / fmean(_MIXED_TURNS)
    turns = Turns(
        half,
        round(of_conversations, 3),
        pause,
        turns=_MIXED_TURNS,
        hard_share=_MIXED_HARD_SHARE,
    )
    return partial(make_mixed, mix, turns), f"{mix} Beside them {turns}"


def packaged_model() -> Path:
    """Directory of the tiny reasoner that ships with the package."""
    return Path(str(files("meridian_patch.demo").joinpath("tiny-reasoner"))).resolve()


def find_model(text: str | None) -> Path:
    """A model's directory: a given one, that of a cached name, or by default the packaged one.

    Raises:
        BenchError: no such model on this machine, or a directory without one.
    """
    path = packaged_model() if text is None else model_files.find_model(text)
    if path is None:
        raise BenchError(model_files.describe_missing(str(text)))
    if not (path / "config.json").is_file():
        raise BenchError(
            f"model directory {path} holds no config.json; give --model DIR, a directory as "
            "written by transformers' save_pretrained"
        )
    return path.resolve()


def any_settings(
    model: Path,
    blocks: int | None,
    extra: tuple[str, ...],
    sizes: tuple[int, int] = SIZES["problems"],
    device: EmulatedDevice | None = None,
) -> ServerSettings:
    """Servers of a model: the tiny reasoner's own settings, or vLLM's defaults for any other.

    Args:
        model: from ``find_model``.
        blocks: KV pool of each server in blocks; None for the default.
        extra: further options of every server.
        sizes: of the tiny reasoner, one of ``SIZES``.
        device: that the servers emulate; its pool is the default then.

    Raises:
        BenchError: the pool of a tiny reasoner does not hold one request.
    """
    if model != packaged_model():
        return ServerSettings(model, blocks, extra=extra, device=device)
    default_blocks, context = sizes
    needed = -(-context // _BLOCK_SIZE) + 1
    if blocks is not None and blocks < needed:
        raise BenchError(
            f"--blocks is {blocks}, expected at least {needed}: one request of {context} tokens "
            "must fit into the KV pool"
        )
    return ServerSettings(
        model,
        blocks or (None if device else default_blocks),
        block_size=_BLOCK_SIZE,
        max_num_seqs=MOST_SEQS if device else 40,
        max_num_batched_tokens=512,
        max_model_len=context,
        dtype="float32",
        reasoning_parser="deepseek_r1",
        # Compiling takes half of a start here, and no step is faster for it.
        extra=("--enforce-eager", *extra),
        device=device,
    )


def _check_ample(arms: Sequence[ServedArm], settings: ServerSettings) -> None:
    for arm in arms:
        if arm.pool_factor > 1 and settings.kv_blocks is None:
            raise BenchError(
                f"--arms: {arm.name} has {arm.pool_factor} times the KV pool of the others; give "
                "theirs with --blocks"
            )


def _keeping_thoughts(
    arms: Sequence[ServedArm], settings: ServerSettings
) -> tuple[list[ServedArm], ServerSettings]:
    """Arms and servers of the tiny reasoner whose prompts hold earlier thoughts.

    Its own template strips them, and its family file says so: it is served with its other template
    and ``kv.history``, which an arm's own setting overrides.
    """
    template = ("--chat-template", str(settings.model / _KEEPING_TEMPLATE))
    history = override({"kv.history": "keep"})
    return (
        [replace(arm, environment=history | dict(arm.environment)) for arm in arms],
        replace(settings, extra=(*template, *settings.extra)),
    )


def _seeds(parsed: argparse.Namespace) -> list[int]:
    """One number per pair; with a trace file they only count the pairs."""
    pairs = read_whole("--pairs", parsed.pairs or DEFAULT_PAIRS)
    if parsed.trace is not None:
        if parsed.seeds is not None:
            raise BenchError("--seeds draws traces and --trace gives one; leave one of them out")
        return list(range(1, pairs + 1))
    if parsed.seeds is None:
        return list(range(FIRST_SEED, FIRST_SEED + pairs))
    seeds = read_seeds(parsed.seeds)
    if parsed.pairs is not None and len(seeds) != pairs:
        raise BenchError(
            f"--pairs is {pairs} and --seeds is {parsed.seeds!r}, which are {len(seeds)}; expected "
            "one seed per pair, so leave one of the options out"
        )
    return seeds


def _serve_args(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BenchError(f"--serve-args is {text!r}: {error}; quote it as in a shell") from None


def _port(text: str, arms: int) -> int:
    last = _HIGHEST_PORT - arms + 1
    if not WHOLE.fullmatch(text) or int(text) > last:
        raise BenchError(
            f"--port is {shown(text)}, expected 0 to {last}: each arm takes the next one"
        )
    return int(text)
