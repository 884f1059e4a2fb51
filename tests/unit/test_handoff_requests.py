"""The bodies of the requests that a hand-off consists of."""

import pytest

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.requests import can_be_handed_off, cleaned, ingest, resume, ticket_in
from meridian_patch.handoff.ticket import FACTS, NOT_KNOWN, PROMPT_IDS, facts_in

LAYOUT = {"model": "m", "weights": "w", "block_size": 32, "cache_dtype": "auto", "dtype": "float32"}
TICKET = {
    PROMPT_IDS: [1, 2, 10],
    FACTS: {
        "num_prompt_tokens": 2,
        "num_output_tokens": 1,
        "max_tokens_left": 9,
        "layout": LAYOUT,
    },
}
CHAT = {"messages": [{"role": "user", "content": "q"}]}


@pytest.mark.parametrize("body", (CHAT, {"prompt": "q"}), ids=("chat", "completion"))
def test_token_ids_are_not_truncated(body: dict) -> None:
    body = body | {"truncate_prompt_tokens": 2, "truncation_side": "left"}
    for sent in (ingest(body, TICKET), resume(body, [1, 2, 10], 1)):
        assert not any("trunc" in name for name in sent)


@pytest.mark.parametrize(
    ("part", "may_move"),
    (
        ({"text": "q"}, True),
        ({"type": "text", "text": "q", "cache_control": {}}, True),
        ({"image_url": "http://x/y.png"}, False),
        ({"type": "text", "text": "q", "image_url": {"url": "http://x/y.png"}}, False),
    ),
    ids=str,
)
def test_media_are_known_by_their_keys_too(part: dict, may_move: bool) -> None:
    assert can_be_handed_off({"messages": [{"role": "user", "content": [part]}]}) == may_move


def test_numbers_may_be_strings() -> None:
    body = CHAT | {"min_tokens": "5", "max_tokens": "100"}
    assert can_be_handed_off(body)
    assert ingest(body, TICKET)["min_tokens"] == 4
    sent = resume(body, [1, 2, 10], 1)
    assert (sent["min_tokens"], sent["max_tokens"]) == (4, 99)
    assert not can_be_handed_off(CHAT | {"max_tokens": "many"})
    assert not can_be_handed_off(CHAT | {"min_tokens": [5]})


def test_a_chat_with_a_stray_prompt_is_a_chat() -> None:
    sent = resume(CHAT | {"prompt": "stray"}, [1, 2, 10], 1)
    assert sent["kv_transfer_params"] == {PROMPT_IDS: [1, 2, 10]}


def test_tickets_of_clients_are_removed_wherever_they_may_be() -> None:
    tickets = {"kv_transfer_params": {"remote_host": "x"}, "ec_transfer_params": {"x": 1}}
    body = {**tickets, "vllm_xargs": {**tickets, "a": 1}}
    body["sampling_params"] = {"top_k": 1, "extra_args": {**tickets, "b": 2}}
    assert cleaned(body) == {
        "vllm_xargs": {"a": 1},
        "sampling_params": {"top_k": 1, "extra_args": {"b": 2}},
    }
    assert "kv_transfer_params" in body["sampling_params"]["extra_args"]


@pytest.mark.parametrize(("num_output_tokens", "left"), ((15, 1), (4, 12), (20, 1)))
def test_the_limit_of_a_completion_without_one_goes_on(num_output_tokens: int, left: int) -> None:
    ids = [1] * (num_output_tokens + 2)
    assert resume({"prompt": "q"}, ids, num_output_tokens)["max_tokens"] == left
    assert "max_tokens" not in resume(CHAT, ids, num_output_tokens)


def test_a_ticket_limits_what_follows() -> None:
    sent = resume(CHAT | {"max_completion_tokens": 50}, [1, 2, 10], 1, 7)
    assert sent["max_tokens"] == 7
    assert "max_completion_tokens" not in sent


def test_a_ticket_that_does_not_say_its_adapter_is_one_all_the_same() -> None:
    """Of an older think engine: proxies pass it on, and the answer engine computes again."""
    ticket = ticket_in({"kv_transfer_params": TICKET})
    assert ticket == TICKET
    facts = facts_in(TICKET)
    assert facts is not None
    assert facts.adapter == NOT_KNOWN
    sent = ingest(CHAT, ticket)["kv_transfer_params"]
    assert sent[FACTS] == TICKET[FACTS]
    wrong = {**TICKET, FACTS: {**TICKET[FACTS], "adapter": 5}}
    with pytest.raises(ConfigError, match=r"meridian_handoff\.adapter is 5"):
        facts_in(wrong)
