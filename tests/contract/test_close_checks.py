"""What vLLM's own parts do to a token that our masks leave, and what its grammars say of one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from exit_driver import exit_driver, thinker
from scheduler_driver import THINK_END, TURN_END, WORD, engine_config
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import BatchUpdateBuilder
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.structured_output import StructuredOutputManager

from meridian_patch.engine.boundaries import vocabulary_of
from meridian_patch.engine.early_exit.close_checks import CloseChecks, WrapUps
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.telemetry.counters import PhaseCounters

# The tiny reasoner's ids of "b" and "7".
assert ord("b") - ord("!") == WORD
SEVEN = ord("7") - ord("!")
VOCABULARY = 260
MASKED = -float("inf")
THINK_START = 256


def structured(demo_model, regex, *, parser="", in_reasoning=False):
    """Checks of an engine, and a request whose answer is to match a regex."""
    config = copy.copy(engine_config(demo_model, is_async=False, blocks=50))
    config.structured_outputs_config = copy.copy(config.structured_outputs_config)
    config.structured_outputs_config.reasoning_parser = parser
    config.structured_outputs_config.enable_in_reasoning = in_reasoning
    manager = StructuredOutputManager(config)
    scheduler = SimpleNamespace(
        vllm_config=config,
        structured_output_manager=manager,
        num_spec_tokens=0,
        use_v2_model_runner=False,
    )
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
    sampling.structured_outputs._backend = "xgrammar"
    sampling.update_from_generation_config({}, TURN_END)
    request = Request("r", [WORD, THINK_START], sampling, None)
    manager.grammar_init(request)
    future = request.structured_output_request._grammar
    if hasattr(future, "result"):
        future.result()
    return CloseChecks(scheduler, (THINK_END,)), manager, request


def say(manager, request, *token_ids):
    for token_id in token_ids:
        request.append_output_token_ids(token_id)
        assert manager.accept_tokens(request, [token_id])


@pytest.mark.parametrize("more", [{}, {"parser": "qwen3", "in_reasoning": True}])
def test_a_grammar_that_binds_is_asked(demo_model, more):
    """It says what it accepts now, and asking changes nothing."""
    checks, manager, request = structured(demo_model, r"b{3}</think>7", **more)
    for _ in range(3):
        assert not checks.accepts(request, (THINK_END,))
        assert checks.obstacle(request, 10) == "grammar"
        say(manager, request, WORD)
    for _ in range(3):
        assert checks.accepts(request, (THINK_END,))
        assert not checks.accepts(request, (THINK_END, WORD))
        assert checks.accepts(request, (THINK_END, SEVEN))
        assert checks.obstacle(request, 10) is None
    say(manager, request, THINK_END, SEVEN)
    assert not checks.accepts(request, (THINK_END,))


def test_a_grammar_that_rejects_a_wrap_up_gets_the_bare_marker(demo_model):
    """It binds the thought, and accepts the marker there."""
    checks, manager, request = structured(demo_model, r"b{3}(So)?</think>7")
    boundaries = Boundaries("tiny", ((THINK_START,),), ((THINK_END,),), (THINK_END,))
    tokenizer = cached_tokenizer_from_config(manager.vllm_config.model_config)
    counters = PhaseCounters()
    wraps = WrapUps(vocabulary_of(tokenizer, "tiny"), boundaries, checks, "all", counters)
    for _ in range(3):
        say(manager, request, WORD)
    assert wraps.choose(request, "So, stop.", 3) == ()
    assert wraps.choose(request, "So", 3) == tuple(tokenizer.encode("So"))
    assert counters.totals == {"wrap_up_left_out:undone": 1}


def test_a_grammar_that_waits_is_not_asked(demo_model):
    """It begins with the first token behind the boundary."""
    checks, manager, request = structured(demo_model, "7", parser="qwen3")
    say(manager, request, WORD, WORD)
    assert checks.accepts(request, (THINK_END,))
    assert checks.obstacle(request, 10) is None
    say(manager, request, THINK_END)
    assert checks.obstacle(request, 10) == "grammar"
    assert checks.accepts(request, (SEVEN,))
    say(manager, request, SEVEN)


def test_a_close_that_a_grammar_no_longer_accepts_is_given_up(monkeypatch, demo_model):
    """It is asked again where the token is forced."""
    driver = exit_driver(monkeypatch, demo_model, EXIT__MAX_THINK_TOKENS="40", EXIT__EAT="false")
    exits = driver.scheduler.early_exit
    asked = []

    def accepts(request, token_ids):
        asked.append(token_ids)
        return len(asked) == 1

    exits.forced_closes.checks.accepts = accepts
    driver.add(thinker("r", 100))
    driver.drain()
    assert not driver.forced
    assert driver.scheduler.phase_counters.totals["exit_given_up:grammar"] == 1
    assert not len(exits.forced_closes)


def masked():
    """Logits of one row behind our mask: one token is left."""
    logits = torch.full((1, VOCABULARY), MASKED)
    logits[0, THINK_END] = -3.0
    return logits


def applied(processor_class, sampling, logits):
    """What a processor of vLLM's makes of a row with these parameters, at the second token."""
    processor = processor_class(
        SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1)),
        torch.device("cpu"),
        False,
    )
    builder = BatchUpdateBuilder()
    builder.added = [(0, sampling, [WORD], [WORD])]
    processor.update_state(builder.get_and_reset(1))
    return processor.apply(logits)


def only(logits):
    """The tokens that are left."""
    return torch.isfinite(logits[0]).nonzero().flatten().tolist()


def test_biases_that_are_finite_change_nothing():
    """They are added, and what is masked stays masked; one that is not finite is another matter."""
    finite = SamplingParams(logit_bias={THINK_END: -100.0, WORD: 100.0})
    assert only(applied(LogitBiasLogitsProcessor, finite, masked())) == [THINK_END]
    infinite = SamplingParams()
    infinite.logit_bias = {THINK_END: MASKED}
    assert only(applied(LogitBiasLogitsProcessor, infinite, masked())) == []


def test_min_tokens_take_a_stop_token_away():
    """And leave nothing; other tokens are left alone."""
    sampling = SamplingParams(min_tokens=9, stop_token_ids=[THINK_END])
    assert only(applied(MinTokensLogitsProcessor, sampling, masked())) == []
    other = SamplingParams(min_tokens=9, stop_token_ids=[WORD])
    assert only(applied(MinTokensLogitsProcessor, other, masked())) == [THINK_END]


def test_what_keeps_the_one_token():
    """min_p, and penalties on a token that was said already."""
    assert only(applied(MinPLogitsProcessor, SamplingParams(min_p=0.9), masked())) == [THINK_END]
    said = torch.tensor([[THINK_END, WORD]])
    one = torch.ones(1)
    logits = apply_all_penalties(masked(), said, 2 * one, 2 * one, 1.5 * one, said.tolist())
    assert only(logits) == [THINK_END]


def test_bad_words_take_their_last_token_away():
    """Behind the tokens before it, or always where there are none."""
    logits = masked()
    apply_bad_words(logits, {0: [[WORD, THINK_END]]}, [[WORD]])
    assert only(logits) == []
