"""Judges both sides of a hand-off: each answer engine, then one request that moves."""

import json
import ssl
import uuid
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import cycle, islice
from string import ascii_lowercase
from typing import Any, Final, NamedTuple

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.answer_engine import (
    ASKED,
    METRICS,
    MODELS,
    PAGES,
    TOKENS,
    VERSION,
    Pages,
    Same,
    compare,
    key_of,
    same_in,
    served_name,
    tls_of,
)
from meridian_patch.operate.doctor.behaviour import (
    CHAT,
    QUESTION,
    REPLY_TOKENS,
    body_to_close,
    refused,
    scrape_once,
    summary_of,
)
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.operate.http_client import Reply, ServerClient, ServerError, read_object
from meridian_patch.operate.scrape import Scrape, ScrapeError, parse

AREA: Final = Area("hand-off")
_HANDOFFS: Final = "meridian_handoffs_total"
_STAYS: Final = "meridian_handoff_stays_total"
_TAKEN: Final = "vllm:external_prefix_cache_hits_total"
_FAILED: Final = "vllm:nixl_num_failed_transfers_total"
# Load-bearing: vLLM's NIXL connector alone has metrics of its own.
_NIXL: Final = "\nvllm:nixl_"
# Of a chat template, beside a prompt whose words may be two tokens each.
_TEMPLATE_TOKENS: Final = 64
_NOT_VLLM: Final = "give the address of vLLM's own server"
_FIXES: Final = {
    VERSION: _NOT_VLLM,
    MODELS: _NOT_VLLM,
    "reply to the key": "set handoff.api_key_file, here and at the think server",
    "token endpoint": "start it with meridian serve --role answer, or with --enable-scale-out",
}
_ALIKE: Final = "start both engines with the same model, vLLM release and options"

Reports = Sequence[Mapping[str, Any]]


def check_handoff(
    think: ServerClient, urls: Sequence[str], config: HandoffConfig, reports: Reports
) -> Iterator[Finding]:
    """Each answer engine against the think server, then one request that should move.

    Args:
        think: for the think server's address.
        urls: of its answer engines.
        config: how they are asked, and when requests move.
        reports: of this user's patched processes on this machine.
    """
    try:
        pages = {path: think.get(path) for path in PAGES}
        same = same_in(pages)
    except ServerError as error:
        yield AREA.skip("think server", str(error))
        return
    if same is None:
        yield AREA.fail(
            "think server",
            f"{think.url} does not show its model, vLLM release and KV cache",
            expected=f"them at {', '.join(PAGES)}",
            fix="give vLLM's own server by --url, and its key by --api-key-file",
        )
        return
    try:
        key, tls = key_of(config), tls_of(config)
    except ConfigError as error:
        yield AREA.fail(
            "key and certificates",
            str(error),
            expected="files that can be read",
            fix="correct handoff.api_key_file or handoff.ca_file",
        )
        return
    answers = []
    for url in dict.fromkeys(urls):
        try:
            answer = ServerClient(url, key, config.answer_wait_s, tls=tls, is_direct=True)
        except ServerError as error:
            yield AREA.fail(
                "address", str(error), expected="http://host:port", fix="correct --answer"
            )
            continue
        answers.append(answer)
        yield from check_answer(answer, same, pages, str(config.ca_file or "the system"), key)
    yield from _check_move(think, _Move(same, served_name(same, pages), config), answers, reports)


def check_answer(
    answer: ServerClient, same: Same, think: Pages, trust: str, key: str | None
) -> Iterator[Finding]:
    """What an answer engine shows.

    Args:
        answer: for the engine's address.
        same: what it must have in common with the think server.
        think: the think server's pages.
        trust: what verifies its certificate.
        key: what is sent to it; None: nothing.
    """
    area = Area(f"answer engine {answer.url}")
    try:
        pages = {path: answer.get(path) for path in PAGES}
    except ServerError as error:
        yield _unreachable(area, error, trust)
        return
    try:
        pages[TOKENS] = answer.post(TOKENS, json.loads(ASKED))
    except ServerError as error:
        # It has the endpoint or not, and may have too much to do.
        pages[TOKENS] = Reply(HTTPStatus.GATEWAY_TIMEOUT, str(error))
    yield area.ok("reachable", answer.url)
    if answer.url.startswith("https:"):
        yield area.ok("TLS", f"verified by {trust}")
    for fact in compare(same, pages):
        if fact.expected:
            fix = _FIXES.get(fact.name, _ALIKE)
            yield area.fail(fact.name, fact.found, expected=fact.expected, fix=fix)
        else:
            yield area.ok(fact.name, fact.found)
        if fact.name == "model" and key is not None:
            yield area.ok("key", "taken")
    if read_object(pages[VERSION].text):
        yield check_connector(area, think[METRICS][1], pages[METRICS].text)


def check_connector(area: Area, think: str, answer: str) -> Finding:
    """Whether both sides have the connector that pages of metrics show.

    Args:
        area: of the finding.
        think: the think server's page.
        answer: the answer engine's.
    """
    check, ours, theirs = "connector", _NIXL in think, _NIXL in answer
    if ours and theirs:
        return area.ok(check, "NIXL, as at the think server")
    if not ours and not theirs:
        return area.skip(check, "neither side shows NIXL, and no other connector is shown")
    return area.fail(
        check,
        "NIXL" if theirs else "not NIXL",
        expected="NIXL, as at the think server" if ours else "the think server's, not NIXL",
        fix="start both with meridian serve --role and the same --fabric",
    )


def _unreachable(area: Area, error: ServerError, trust: str) -> Finding:
    if isinstance(getattr(error.__cause__, "reason", None), ssl.SSLCertVerificationError):
        return area.fail(
            "TLS",
            str(error),
            expected=f"a certificate that {trust} verifies, for this name",
            fix="name what signed it by handoff.ca_file, here and at the think server",
        )
    return area.fail(
        "reachable",
        str(error),
        expected="an engine that answers",
        fix="start it, or correct host and port",
    )


class _Move(NamedTuple):
    """A request that should move.

    Attributes:
        same: what the think server shows of itself.
        model: the name of its model.
        config: its threshold, as far as it is that of the server.
    """

    same: Same
    model: str
    config: HandoffConfig

    @property
    def least_tokens(self) -> int:
        """Tokens up to the end of the thought from which on it moves."""
        return self.config.offload_threshold_blocks * int(self.same.block_size)

    def body(self) -> dict[str, Any]:
        """Its thought is closed soon, and its answer is longer than one token."""
        most = max((self.same.length - REPLY_TOKENS - _TEMPLATE_TOKENS) // 2, 0)
        # Each word is a token at least. No prefix cache has the first one.
        words = islice(cycle(ascii_lowercase), min(self.least_tokens, most))
        prompt = " ".join((uuid.uuid4().hex[:8], *words))
        return {**body_to_close(self.model, f"{prompt}\n{QUESTION}"), "ignore_eos": True}


def _check_move(
    think: ServerClient, move: _Move, answers: Sequence[ServerClient], reports: Reports
) -> Iterator[Finding]:
    check = "one request"
    try:
        before = parse(think.metrics(), 0.0)
        if not before.has(_HANDOFFS):
            yield AREA.fail(
                check,
                f"not sent: {think.url}{METRICS} has no {_HANDOFFS}",
                expected="a patched server",
                fix="start it with meridian serve --role think --answer URL",
            )
            return
        loads = [(answer, _loads(answer)) for answer in answers]
        reply = think.post(CHAT, move.body())
        if not reply.is_ok:
            yield refused(check, reply, AREA)
            yield check_role(False, think.is_local, reports)
            return
        after = scrape_once(think, lambda scrape: bool(_ended(before, scrape)))
        ended = _ended(before, after)
        yield judge_move(ended, _rose(before, after, _STAYS, "reason"), reply, move)
        if "moved" in ended:
            yield _judge_loads([(answer.url, old, _loads(answer)) for answer, old in loads])
        yield check_role(bool(ended), think.is_local, reports)
    except (ServerError, ScrapeError) as error:
        yield AREA.fail(
            check,
            str(error),
            expected="a reply within the limit",
            fix="look at the server's load and log, or raise --limit-s",
        )


def judge_move(
    ended: Mapping[str, float], stays: Mapping[str, float], reply: Reply, move: _Move
) -> Finding:
    """The finding for a request by what the think server counted meanwhile.

    Args:
        ended: outcome -> requests that left after their thought.
        stays: reason -> requests that could not move.
        reply: to the request.
        move: the request.
    """
    check, expected = "one request", f'{_HANDOFFS}{{outcome="moved"}} counts it'
    if ended.get("answered_at_home"):
        return AREA.fail(
            check,
            f"{_HANDOFFS} counted {_counts(ended)}",
            expected=expected,
            fix="look at the think server's log: it has the answer engine that it lost, and why",
        )
    if ended.get("moved"):
        return AREA.ok(check, f"{_HANDOFFS} counted {_counts(ended)}")
    if stays:
        return AREA.warn(
            check,
            f"not moved: {_STAYS} counted {_counts(stays)}, unless other requests did",
            expected=expected,
            fix="look at the server's default sampling parameters; docs/handoff.md has what moves",
        )
    return AREA.warn(
        check,
        f"not moved, and not counted: {_why_uncounted(reply, move)}",
        expected=expected,
        fix="start it with meridian serve --role think --answer URL, or ask it something longer",
    )


def _why_uncounted(reply: Reply, move: _Move) -> str:
    told = read_object(reply.text)
    summary, usage = summary_of(told), told.get("usage") or {}
    if summary.get("exit_reason") is None:
        return "the reply has no thought that ended"
    tokens = (usage.get("prompt_tokens") or 0) + (summary.get("think_tokens") or 0)
    threshold = f"handoff.offload_threshold_blocks of {move.config.offload_threshold_blocks} here"
    if tokens < move.least_tokens:
        return f"after its thought it had {tokens} tokens, too few for {threshold}"
    return (
        f"after its thought it had {tokens} tokens, enough for {threshold}; the server may have "
        "another role, know no answer engine, or have a higher threshold"
    )


def check_role(has_left: bool, is_local: bool, reports: Reports) -> Finding:
    """Whether the server has the role ``think``.

    Args:
        has_left: whether a request left it after its thought.
        is_local: whether it is on this machine.
        reports: of this user's patched processes on this machine.
    """
    check = "role"
    if has_left:
        return AREA.ok(check, "think: a request left after its thought")
    cores = [each for each in reports if each.get("role") == "engine_core"]
    if not is_local or not cores:
        return AREA.skip(check, "no process of the server is seen from here")
    roles = ", ".join(f"{each.get('handoff')} (process {each.get('pid')})" for each in cores)
    if all(each.get("handoff") != "think" for each in cores):
        return AREA.fail(
            check,
            f"engines of this machine have the roles {roles}",
            expected="think",
            fix="start it with meridian serve --role think --answer URL",
        )
    if len(cores) > 1:
        return AREA.skip(check, f"one of these is the server's, which is not seen: {roles}")
    return AREA.ok(check, roles)


def _judge_loads(loads: Sequence[tuple[str, Scrape, Scrape]]) -> Finding:
    """The finding for what answer engines read of the KV cache of a request that moved."""
    check = "KV cache"
    expected = "an answer engine reads it"
    for url, before, after in loads:
        failed = _more(before, after, _FAILED)
        if failed > 0:
            return AREA.warn(
                check,
                f"{url} failed to read it {failed:.0f} times, and computed it again",
                expected=expected,
                fix="look at its log; the think engine's VLLM_NIXL_SIDE_CHANNEL_HOST must be an "
                "address that it reaches",
            )
    taken = [(url, _more(before, after, _TAKEN)) for url, before, after in loads]
    by = ", ".join(f"{url} took {tokens:.0f} tokens of it" for url, tokens in taken if tokens > 0)
    if by:
        return AREA.ok(check, by)
    return AREA.warn(
        check,
        "none of these answer engines took it: one computed it again, or another one answered",
        expected=expected,
        fix="give the engines that the think server has, and start all with the same --fabric",
    )


def _loads(answer: ServerClient) -> Scrape:
    """What an engine has read; one that is out of order has read nothing."""
    try:
        return parse(answer.metrics(), 0.0)
    except (ServerError, ScrapeError):
        return Scrape(0.0, {})


def _more(before: Scrape, after: Scrape, name: str) -> float:
    return (after.total(name) or 0.0) - (before.total(name) or 0.0)


def _ended(before: Scrape, after: Scrape) -> dict[str, float]:
    """Requests that moved or came back in between, by outcome."""
    rose = _rose(before, after, _HANDOFFS, "outcome")
    return {name: count for name, count in rose.items() if name != "aborted"}


def _rose(before: Scrape, after: Scrape, name: str, label: str) -> dict[str, float]:
    old = before.by(name, label)
    rose = {each: count - old.get(each, 0.0) for each, count in after.by(name, label).items()}
    return {each: count for each, count in rose.items() if count > 0}


def _counts(rose: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in rose.items())
