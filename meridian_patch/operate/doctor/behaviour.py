"""Judges how a server behaves: a forced close, its token counts, and the prefix cache."""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from meridian_patch.exit.actions import Obstacle
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.operate.http_client import Reply, ServerClient, ServerError, read_object
from meridian_patch.operate.scrape import Scrape, ScrapeError, parse

AREA = Area("server")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CAP_TOKENS = 8
# The cap, the text that closes a thought, and some tokens of the answer.
REPLY_TOKENS = 96
QUESTION = "What is 17 * 23? Think step by step, then give the number."
_HITS = "vllm:prefix_cache_hits_total"
_BLOCK_TOKENS = 16
_WORD_TOKENS = 6
_SHORT_MODEL = 4096
_COUNTED_WITHIN_S = 5.0
_POLL_S = 0.25
_WORDS = "docs/requests.md, 'What could not be enforced'"
# Load-bearing: vLLM's server sends a request with this header to that engine; each engine has a
# prefix cache of its own.
_TO_FIRST_ENGINE = {"X-data-parallel-rank": "0"}

Clock = Callable[[], float]


def check_behaviour(client: ServerClient, scrape: Scrape) -> Iterator[Finding]:
    """One forced close, and one prompt asked twice.

    Args:
        client: for a server that answers.
        scrape: its metrics.
    """
    try:
        model = _served_model(client)
        if model is None:
            yield AREA.fail(
                "model",
                f"{client.url}/v1/models names no model",
                expected="a served model",
                fix="give the API key with --api-key-file, or ask vLLM's own server",
            )
            return
        yield from check_close(client, str(model["id"]))
        yield check_prefix_cache(client, model, scrape)
    except (ServerError, ScrapeError) as error:
        yield AREA.fail(
            "behaviour",
            str(error),
            expected="a reply within the limit",
            fix="look at the server's load and log, or raise --limit-s",
        )


def check_close(client: ServerClient, model: str) -> Iterator[Finding]:
    """A thought is closed at its cap, and the reply says so and counts its tokens.

    Raises:
        ServerError: there is no reply.
    """
    reply = client.post(CHAT, body_to_close(model, QUESTION))
    if not reply.is_ok:
        yield refused("forced close", reply)
        return
    told = read_object(reply.text)
    summary = summary_of(told)
    yield judge_close(summary)
    yield judge_reasoning_tokens(told.get("usage") or {}, summary)


def body_to_close(model: str, question: str) -> dict[str, Any]:
    """A chat request whose thought is closed after ``CAP_TOKENS`` tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": REPLY_TOKENS,
        "vllm_xargs": {
            "meridian_exit": "enforce",
            "meridian_max_think_tokens": CAP_TOKENS,
            "meridian_min_think_tokens": 0,
        },
    }


def judge_close(summary: dict[str, Any]) -> Finding:
    """The finding for a choice's ``meridian`` field after a forced close."""
    check, reason = "forced close", summary.get("exit_reason")
    expected = f"exit_reason hard_cap at {CAP_TOKENS} think tokens"
    if reason == "hard_cap":
        return AREA.ok(check, f"exit_reason hard_cap after {summary.get('think_tokens')} tokens")
    obstacles = summary.get("not_enforced") or {}
    if obstacles.get("hard_cap") == Obstacle.NO_BOUNDARY:
        return AREA.warn(
            check,
            "no thought can be closed: the model's end of thinking is not known",
            expected=expected,
            fix="nothing, if the model does not think; otherwise the remedy of 'no_boundary' is in "
            f"{_WORDS}",
        )
    if "hard_cap" in obstacles:
        return AREA.fail(
            check,
            f"hard_cap could not close the thought: {obstacles['hard_cap']}",
            expected=expected,
            fix=f"the remedy of {obstacles['hard_cap']!r} is in {_WORDS}",
        )
    if reason is None:
        return AREA.fail(
            check,
            "the reply says nothing of a thought: the model's boundaries are not known, its "
            f"prompt opens no thought, or it did not think within {REPLY_TOKENS} tokens",
            expected=expected,
            fix="meridian doctor MODEL says which boundaries it has and what its template opens",
        )
    return AREA.warn(
        check,
        f"exit_reason {reason} after {summary.get('think_tokens')} tokens: the thought ended "
        "before it could be closed",
        expected=expected,
        fix="none is needed if the model thinks that briefly; ask it something harder yourself",
    )


def judge_reasoning_tokens(usage: dict[str, Any], summary: dict[str, Any]) -> Finding:
    """The finding for the token count of a reply whose thought was closed."""
    check = "reasoning_tokens"
    count = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    thought = summary.get("think_tokens")
    if count is None:
        return AREA.skip(check, "usage has none: is responses.reasoning_tokens off?")
    if count == 0 and thought:
        return AREA.warn(
            check,
            f"usage says 0, the thought had {thought} tokens",
            expected="the thought's tokens",
            fix="read think_tokens in the choice's field meridian, or update meridian_patch",
        )
    return AREA.ok(check, f"usage says {count}")


def check_prefix_cache(client: ServerClient, model: dict[str, Any], scrape: Scrape) -> Finding:
    """A prompt asked twice hits the prefix cache.

    Raises:
        ServerError: there is no reply.
        ScrapeError: the server's metrics cannot be read.
    """
    check, info = "prefix cache", "vllm:cache_config_info"
    if scrape.label(info, "enable_prefix_caching") == "False":
        return AREA.warn(
            check,
            "switched off",
            expected="on: probes of thoughts and resumed requests need it",
            fix="start the server with --enable-prefix-caching",
        )
    if not scrape.has(_HITS):
        return AREA.skip(check, f"the server does not export {_HITS}")
    block = _whole_number(scrape.label(info, "block_size")) or _BLOCK_TOKENS
    body = {"model": model["id"], "prompt": _prompt(block, model), "max_tokens": 1}
    first = client.post(COMPLETIONS, body, _TO_FIRST_ENGINE)
    before = parse(client.metrics(), 0.0).total(_HITS) or 0.0
    second = client.post(COMPLETIONS, body, _TO_FIRST_ENGINE) if first.is_ok else first
    if not second.is_ok:
        return refused(check, second)
    tokens = int((read_object(second.text).get("usage") or {}).get("prompt_tokens") or 0)
    if tokens <= block:
        return judge_hits(0.0, tokens, block)
    after = scrape_once(client, lambda scrape: (scrape.total(_HITS) or 0.0) > before)
    return judge_hits((after.total(_HITS) or 0.0) - before, tokens, block)


def judge_hits(hits: float, tokens: int, block: int) -> Finding:
    """The finding for a prompt of ``tokens`` that hit ``hits`` of them when asked again."""
    check = "prefix cache"
    if tokens <= block:
        return AREA.skip(check, f"a prompt of {tokens} tokens fills no block of {block}")
    if hits > 0:
        return AREA.ok(check, f"{hits:.0f} of {tokens} prompt tokens hit when asked again")
    return AREA.fail(
        check,
        f"a prompt of {tokens} tokens hit none when asked again at once",
        expected=f"at least a block of {block} tokens",
        fix="look whether the KV pool is full (vllm:kv_cache_usage_perc), or give it more memory",
    )


def _prompt(block: int, model: dict[str, Any]) -> str:
    """A prompt of some blocks, with a beginning that no earlier request had."""
    most = _whole_number(model.get("max_model_len")) or _SHORT_MODEL
    words = max(1, min(2 * block, (most - _BLOCK_TOKENS) // _WORD_TOKENS))
    return f"{uuid.uuid4().hex[:8]} " + " ".join(str(100 + index) for index in range(words))


def scrape_once(
    client: ServerClient, is_counted: Callable[[Scrape], bool], clock: Clock = time.monotonic
) -> Scrape:
    """The server's metrics once it has counted something, or after 5 s.

    Args:
        client: for the server's address.
        is_counted: whether a page has it.
        clock: in seconds.

    Raises:
        ServerError: there is no page.
        ScrapeError: it cannot be read.
    """
    end = clock() + _COUNTED_WITHIN_S
    while True:
        scrape = parse(client.metrics(), 0.0)
        if is_counted(scrape) or clock() > end:
            return scrape
        time.sleep(_POLL_S)


def _served_model(client: ServerClient) -> dict[str, Any] | None:
    models = read_object(client.get("/v1/models").text).get("data")
    first = models[0] if isinstance(models, list) and models else None
    return first if isinstance(first, dict) and "id" in first else None


def refused(check: str, reply: Reply, area: Area = AREA) -> Finding:
    """The finding for a request that the server did not serve."""
    if "allowed_fields" in reply.text:
        return area.skip(check, f"requests may not ask for it: {reply.begin}")
    return area.fail(
        check,
        reply.begin,
        expected="HTTP 200",
        fix="read the message; the server's log has more",
    )


def summary_of(reply: dict[str, Any]) -> dict[str, Any]:
    """The field ``meridian`` of a reply's first choice; empty: there is none."""
    choices = reply.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return (first.get("meridian") or {}) if isinstance(first, dict) else {}


def _whole_number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
