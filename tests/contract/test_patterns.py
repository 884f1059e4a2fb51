"""The pattern exit on the real scheduler, and its field where requests come in."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import THINK_END, Job, engine_config
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config

from meridian_patch.engine.api.exit_summary import RequestRefused
from meridian_patch.engine.api.input_check import build_input_processor
from meridian_patch.errors import ConfigError

FIELD = "meridian_exit_patterns"
FLOOR, GRACE = 10, 4
ALONE = {
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
    "EXIT__MIN_THINK_TOKENS": str(FLOOR),
    "EXIT__GRACE_TOKENS": str(GRACE),
}
GIVE_UP = {"EXIT__PATTERNS": '["I give up", "never said"]'}


@dataclass(frozen=True)
class Speaker(Job):
    """Says a text in its thought, beginning with a token of it."""

    says: tuple[int, ...] = ()
    at: int = 30

    def token(self, index):
        if self.at <= index < self.at + len(self.says):
            return self.says[index - self.at]
        return super().token(index)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model, is_async=request.param)


@pytest.fixture
def ids_of(demo_model):
    config = engine_config(demo_model, is_async=False, blocks=200)
    tokenizer = cached_tokenizer_from_config(config.model_config)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))


def speaker(name, says, at=30, **kwargs):
    return Speaker(name, thinker(name).prompt, 400, 30, says=says, at=at, **kwargs)


def test_a_thought_that_says_it_is_closed(driver_for, ids_of):
    """Behind the pattern's last token and the grace; one that does not say it goes on."""
    driver = driver_for(**ALONE, **GIVE_UP)
    says = ids_of("I give up")
    driver.add(speaker("says", says))
    driver.add(speaker("almost", (*says[:-1], 65)))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert driver.forced == [("says", THINK_END)]
    assert totals["exit:pattern"] == totals["exit_verdict:pattern"] == totals["exit:natural"] == 1
    assert 0 <= totals["think_tokens:pattern"] - (30 + len(says) + GRACE) <= 2
    assert is_empty(driver)


@pytest.mark.parametrize("at", [0, FLOOR - 10, 2000])
def test_what_is_said_elsewhere_does_not_count(driver_for, ids_of, at):
    """Below the floor, in the prompt and in the answer."""
    driver = driver_for(**ALONE, **GIVE_UP)
    says = ids_of("I give up")
    at = 410 if at == 2000 else at
    job = speaker("r", says, at)
    prompt = (*says, *job.prompt)
    driver.add(Speaker("r", prompt, 400, 60, says=says, at=at))
    driver.drain()
    assert not driver.forced
    assert driver.scheduler.phase_counters.totals["exit:natural"] == 1
    assert is_empty(driver)


def test_observing_closes_nothing(driver_for, ids_of):
    """It says that it would have."""
    driver = driver_for(**ALONE, **GIVE_UP, EXIT__MODE="observe")
    driver.add(speaker("r", ids_of("I give up")))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert not driver.forced
    assert totals["exit:natural"] == totals["exit_verdict:pattern"] == 1


@pytest.mark.parametrize("kind", ["text", "ids", "sequences"])
def test_a_request_has_patterns_of_its_own(driver_for, ids_of, kind):
    """Texts, too, where no API server of ours turned them into tokens."""
    driver = driver_for(**ALONE)
    says = ids_of("so be it")
    value = {"text": "so be it", "ids": list(says), "sequences": [[1, 2], list(says)]}[kind]
    driver.add(speaker("own", says), {FIELD: [value]})
    driver.add(speaker("other", says))
    driver.drain()
    assert [name for name, _ in driver.forced] == ["own"]
    assert driver.scheduler.phase_counters.totals["exit:pattern"] == 1
    assert is_empty(driver)


def test_under_preemption(driver_for, ids_of):
    """Each that says it is closed, once; a pattern may lie across a preemption."""
    driver = driver_for(**ALONE, **GIVE_UP, blocks=24, tiered=True)
    says = ids_of("I give up")
    for number in range(20):
        driver.add(speaker(f"r{number}", says, 40 + 7 * number, max_tokens=300))
        driver.step()
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert totals["preemption:think"] > 0
    assert totals["exit:pattern"] == 20
    assert is_empty(driver)


def test_a_family_has_patterns(driver_for, use_family, ids_of):
    """In section `exit` of its file."""
    use_family(exit={"patterns": ["I give up"]})
    driver = driver_for(**ALONE)
    driver.add(speaker("r", ids_of("I give up")))
    driver.drain()
    assert driver.scheduler.phase_counters.totals["exit:pattern"] == 1


def test_a_server_with_a_wrong_pattern_does_not_start(driver_for):
    """The message names the field."""
    with pytest.raises(ConfigError, match=r"exit\.patterns.*holds token id 99999"):
        driver_for(**ALONE, EXIT__PATTERNS="[[99999]]")


class Stock:
    """What the input processor of vLLM has, as far as ours reads it."""

    def __init__(self, config):
        self.vllm_config = config
        tokenizer = cached_tokenizer_from_config(config.model_config)
        self.renderer = SimpleNamespace(tokenizer=tokenizer)

    def process_inputs(self, request_id, prompt, params):
        return params


@pytest.fixture
def processor(demo_model):
    return build_input_processor(Stock)(engine_config(demo_model, is_async=False, blocks=200))


def test_the_api_server_sends_tokens(processor, ids_of):
    """The caller's parameters stay as they are: it may use them again."""
    params = SamplingParams(extra_args={FIELD: ["so be it"], "other": 1})
    sent = processor.process_inputs("r", "", params).extra_args
    assert list(ids_of("so be it")) in sent[FIELD][0]
    assert sent["other"] == 1
    assert params.extra_args[FIELD] == ["so be it"]
    untouched = SamplingParams(extra_args={"meridian_exit": "off"})
    assert processor.process_inputs("r", "", untouched) is untouched


@pytest.mark.parametrize("value", [[""], [[10**6]], ["so"] * 9], ids=["blank", "id", "many"])
def test_a_pattern_without_tokens_is_refused(processor, value):
    """As HTTP 400, with the field's name."""
    with pytest.raises(RequestRefused, match=f"field {FIELD}"):
        processor.process_inputs("r", "", SamplingParams(extra_args={FIELD: value}))
