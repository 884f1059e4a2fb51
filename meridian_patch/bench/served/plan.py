"""From options to what a served comparison needs: the model, the servers, the traces."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.workload import Mix, TraceRequest, make_trace, read_trace
from meridian_patch.errors import BenchError

DEFAULT_BLOCKS = 96
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def packaged_model() -> Path:
    """Directory of the tiny reasoner that ships with the package."""
    return Path(str(files("meridian_patch.demo").joinpath("tiny-reasoner")))


def find_model(path: Path | None) -> Path:
    """The directory of a model, by default the packaged one.

    Raises:
        BenchError: there is no model in it.
    """
    model = path or packaged_model()
    if not (model / "config.json").is_file():
        raise BenchError(
            f"model directory {model} holds no config.json; give --model DIR, a directory as "
            "written by transformers' save_pretrained"
        )
    return model.resolve()


def find_model_or_name(text: str | None) -> Path | str:
    """A directory as ``find_model`` does, or a name on the Hugging Face hub.

    What looks like ``owner/name`` is a directory when its first folder exists here.

    Raises:
        BenchError: a directory without a model.
    """
    if text is None:
        return find_model(None)
    path = Path(text)
    if _HUB_NAME.fullmatch(text) and not path.parent.exists():
        return text
    return find_model(path)


def tiny_settings(model: Path, blocks: int, extra: tuple[str, ...] = ()) -> ServerSettings:
    """Servers of the tiny reasoner.

    Args:
        model: its directory.
        blocks: KV pool of each server.
        extra: further options of every server.

    Raises:
        BenchError: the pool does not hold one request.
    """
    settings = ServerSettings(model, blocks, extra=extra)
    needed = settings.least_blocks or 0
    if blocks < needed:
        raise BenchError(
            f"--blocks is {blocks}, expected at least {needed}: one request of "
            f"{settings.max_model_len} tokens must fit into the KV pool"
        )
    return settings


def any_settings(model: Path | str, blocks: int | None, extra: tuple[str, ...]) -> ServerSettings:
    """Servers of a model: the tiny reasoner's own settings, or vLLM's defaults for any other.

    Args:
        model: from ``find_model_or_name``.
        blocks: KV pool of each server in blocks; None for the default.
        extra: further options of every server.

    Raises:
        BenchError: the pool of a tiny reasoner does not hold one request.
    """
    if isinstance(model, Path) and model == packaged_model().resolve():
        return tiny_settings(model, blocks or DEFAULT_BLOCKS, extra)
    return ServerSettings.of_any_model(model, blocks, extra)


def plan_traces(
    path: Path | None, mix: Mix, seeds: Sequence[int]
) -> tuple[dict[int, Sequence[TraceRequest]], str]:
    """Traces by seed, and what they are in words.

    Args:
        path: JSON lines that every seed plays in place of drawn problems.
        mix: what is drawn otherwise.
        seeds: one trace each.

    Raises:
        BenchError: the file is not as ``workload.read_trace`` wants it.
    """
    if path is not None:
        trace = read_trace(path)
        return dict.fromkeys(seeds, trace), f"{len(trace)} requests from {path}."
    words = (
        f"{mix.requests} arithmetic problems per seed, {mix.rate_per_s:g} per second in bursts "
        f"(Gamma, shape {mix.burstiness:g}), {mix.hard_share:.0%} of them hard, "
        f"{mix.history_share:.0%} with earlier turns."
    )
    return {seed: make_trace(mix, seed) for seed in seeds}, words
