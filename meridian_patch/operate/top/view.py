"""From two scrapes to what the screen shows. Pure."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from meridian_patch.operate.scrape import RUNNING, Scrape, ScrapeError
from meridian_patch.operate.top.verdict import Load, Verdict, judge
from meridian_patch.operate.top.window import Latency, Window

_GAP = "meridian_inter_token_seconds"
_OWN: Final[Mapping[str, tuple[str, dict[str, str]]]] = {
    "first answer": ("meridian_time_to_first_answer_token_seconds", {}),
    "answer gap": (_GAP, {"phase": "answer"}),
    "think gap": (_GAP, {"phase": "think"}),
}
_OF_STOCK: Final[Mapping[str, tuple[str, dict[str, str]]]] = {
    "first token": ("vllm:time_to_first_token_seconds", {}),
    "next token": ("vllm:inter_token_latency_seconds", {}),
}
_OF_BOTH: Final[Mapping[str, tuple[str, dict[str, str]]]] = {
    "in the queue": ("vllm:request_queue_time_seconds", {}),
    "whole request": ("vllm:e2e_request_latency_seconds", {}),
}


@dataclass(frozen=True, kw_only=True)
class View:
    """What a server did in a window. None, or an empty dict: the server does not tell it.

    Attributes:
        window_s: length of the window.
        is_reset: the server was started anew within it.
        model: name of the served model.
        load: what the verdict rests on.
        generated_per_s: tokens.
        prompt_per_s: tokens, those from the cache included.
        hit_share: share of the prompt tokens looked up that the prefix cache had.
        exits: thoughts ended, by reason.
        evictions: blocks, by tier.
        hits: tokens, by tier.
        latencies: by row of the table; ``first answer`` is the time to the first answer token, and
            a gap the time between two outputs of a request.
        verdict: the bottleneck.
    """

    window_s: float
    is_reset: bool
    model: str | None
    load: Load
    generated_per_s: float | None
    prompt_per_s: float | None
    hit_share: float | None
    exits: Mapping[str, float]
    evictions: Mapping[str, float]
    hits: Mapping[str, float]
    latencies: Mapping[str, Latency]
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """The view as JSON knows it; a number that is not finite, of a strange page, is None."""
        return {name: finite(value) for name, value in asdict(self).items()}


def view(before: Scrape, after: Scrape) -> View:
    """What happened between two scrapes of a server.

    Raises:
        ScrapeError: the page is not that of a vLLM server.
    """
    check_vllm(after)
    window = Window(before, after)
    load = _load(window)
    rows = {**(_OWN if load.is_patched else _OF_STOCK), **_OF_BOTH}
    latencies = {row: window.latency(name, **labels) for row, (name, labels) in rows.items()}
    return View(
        window_s=window.seconds,
        is_reset=window.is_reset,
        model=after.label(RUNNING, "model_name"),
        load=load,
        generated_per_s=window.rate("vllm:generation_tokens_total"),
        prompt_per_s=window.rate("vllm:prompt_tokens_total"),
        hit_share=_share(
            window.count("vllm:prefix_cache_hits_total"),
            window.count("vllm:prefix_cache_queries_total"),
        ),
        exits=window.by("meridian_thoughts_ended_total", "reason"),
        evictions=window.by("meridian_kv_evictions_total", "tier"),
        hits=window.by("meridian_kv_hit_tokens_total", "tier"),
        latencies={row: latency for row, latency in latencies.items() if latency is not None},
        verdict=judge(load),
    )


def check_vllm(scrape: Scrape) -> None:
    """Raise ScrapeError if the page is not that of a vLLM server."""
    if not any(name.startswith("vllm:") for name in scrape.samples):
        raise ScrapeError(
            "these are the metrics of another program, or of a vLLM server with "
            "--disable-log-stats; start it without that, or give the address of a vLLM server"
        )


def _load(window: Window) -> Load:
    after = window.after
    preemptions = window.by("meridian_preemptions_total", "phase")
    return Load(
        window_s=window.seconds,
        is_patched=any(name.startswith("meridian_") for name in after.samples),
        requests=after.by("meridian_requests", "phase"),
        running=after.total(RUNNING),
        waiting=after.total("vllm:num_requests_waiting"),
        # The fullest engine preempts first.
        kv_usage=max(after.by("vllm:kv_cache_usage_perc", "engine").values(), default=None),
        preemptions=preemptions,
        # vLLM counts a preemption later, with the request's next token.
        preempted=sum(preemptions.values())
        if preemptions
        else window.count("vllm:num_preemptions_total"),
        prompt_share=_prompt_share(window),
        fallbacks=window.by("meridian_policy_fallbacks_total", "reason"),
        parts_off=after.by("meridian_parts_off_total", "part"),
    )


def _prompt_share(window: Window) -> float | None:
    prompt = window.count("vllm:prompt_tokens_total")
    generated = window.count("vllm:generation_tokens_total")
    if prompt is None or generated is None:
        return None
    computed = max(0.0, prompt - (window.count("vllm:prompt_tokens_cached_total") or 0.0))
    return _share(computed, computed + generated)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def finite(value: Any) -> Any:
    """The same for JSON: numbers that are not finite are None, in mappings too."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
