"""The bodies of the two requests that a hand-off consists of."""

import pytest

from meridian_patch.engine.wire import FACTS
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.requests import ingest, offload, ticket_in
from meridian_patch.handoff.ticket import NOT_KNOWN, OFFER, facts_in

LAYOUT = {"model": "m", "weights": "w", "block_size": 32, "cache_dtype": "auto", "dtype": "float32"}
TICKET = {
    "remote_host": "think",
    FACTS: {
        "num_prompt_tokens": 2,
        "num_output_tokens": 3,
        "max_tokens_left": 97,
        "layout": LAYOUT,
    },
}


def body_of(**sampling) -> dict:
    return {"token_ids": [1, 2], "sampling_params": sampling, "cache_salt": "s"}


def test_an_offered_request_is_the_clients_otherwise():
    body = body_of(temperature=0)
    assert offload(body) == {**body, "stream": False, "kv_transfer_params": dict(OFFER)}
    assert "kv_transfer_params" not in body


def test_several_choices_would_have_one_ticket():
    with pytest.raises(ConfigError, match="field n is 2, expected 1"):
        offload(body_of(n=2))


def test_the_rest_goes_on_behind_the_thought():
    body = body_of(temperature=0, min_tokens=5, thinking_token_budget=9)
    sent = ingest(body, [7, 8, 10], TICKET)
    assert sent == {
        "token_ids": [1, 2, 7, 8, 10],
        "sampling_params": {
            "temperature": 0,
            "min_tokens": 2,
            "max_tokens": 97,
            "extra_args": None,
        },
        "reasoning_ended": True,
        "cache_salt": "s",
        "kv_transfer_params": TICKET,
    }


def test_budgets_are_counted_once():
    ours = {"meridian_max_think_tokens": 10, "meridian_min_think_tokens": 9}
    ours["meridian_answer_reserve"] = 0.5
    sent = ingest(body_of(max_tokens=100, extra_args=ours), [7, 8, 10], TICKET)
    assert sent["sampling_params"]["extra_args"] == {
        "meridian_max_think_tokens": 7,
        "meridian_min_think_tokens": 6,
        "meridian_answer_reserve": 50,
    }


@pytest.mark.parametrize("reply", ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}))
def test_a_request_that_ended_left_no_ticket(reply):
    assert ticket_in(reply) is None


def test_a_ticket_that_does_not_say_its_adapter_is_one_all_the_same():
    """Of an older think engine: proxies pass it on, and the answer engine computes again."""
    assert ticket_in({"kv_transfer_params": TICKET}) == TICKET
    facts = facts_in(TICKET)
    assert facts is not None
    assert facts.adapter == NOT_KNOWN
    wrong = {**TICKET, FACTS: {**TICKET[FACTS], "adapter": 5}}
    with pytest.raises(ConfigError, match=r"meridian_handoff\.adapter is 5"):
        ticket_in({"kv_transfer_params": wrong})
