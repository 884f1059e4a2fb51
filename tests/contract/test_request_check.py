"""Wrong fields of requests that no API server of ours has checked."""

import logging
from itertools import product
from types import SimpleNamespace

import pytest
import vllm.v1.request as upstream_request
from scheduler_driver import Job
from served_driver import PLAIN, core_request
from tier_driver import driver_for
from vllm import envs as vllm_envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from meridian_patch import envs
from meridian_patch.config.request_options import NO_OPTIONS
from meridian_patch.engine.api.exit_summary import allowed_fields
from meridian_patch.engine.request_check import build_request_check
from meridian_patch.engine.scheduler.options_parser import WARN_EVERY_S

RUST = "VLLM_USE_RUST_FRONTEND"
IS_ANSWERED = hasattr(EngineCoreProc, "_handle_request_validation_error")
WRONG = [
    ({"meridian_max_think_tokens": "many"}, "meridian_max_think_tokens is 'many'"),
    ({"meridian_max_tokens": 5}, "meridian_max_tokens is 5, expected a field that exists"),
    ({"meridian_min_think_tokens": 9, "meridian_max_think_tokens": 8}, "expected at most"),
]


@pytest.fixture(autouse=True)
def reread_configuration():
    yield
    allowed_fields.cache_clear()


@pytest.fixture
def core(monkeypatch, past_the_check):
    """What the input thread of EngineCore needs to build requests, with our check."""
    stock = upstream_request.StructuredOutputRequest
    monkeypatch.setattr(upstream_request, "StructuredOutputRequest", build_request_check(stock))
    allowed_fields.cache_clear()
    return SimpleNamespace(mm_receiver_cache=None, request_block_hasher=None)


def built(core, extra_args):
    """The request that vLLM's own code builds from one with these extra arguments."""
    params = SamplingParams(max_tokens=5, extra_args=extra_args)
    return EngineCore.preprocess_add_request(core, core_request("r", PLAIN, params, "r"))[0]


@pytest.mark.skipif(not IS_ANSWERED, reason="this vLLM answers no refusal of EngineCore's")
@pytest.mark.parametrize(("fields", "named"), WRONG)
def test_enginecore_refuses_a_wrong_field(core, fields, named):
    """As a validation error, which vLLM sends to the client."""
    with pytest.raises(VLLMValidationError) as refused:
        built(core, fields)
    assert named in str(refused.value)


@pytest.mark.skipif(not IS_ANSWERED, reason="this vLLM answers no refusal of EngineCore's")
def test_enginecore_refuses_a_field_that_is_not_allowed(core, monkeypatch):
    """With the message of the API server."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS", "[meridian_exit]")
    assert built(core, {"meridian_exit": "off"})
    with pytest.raises(VLLMValidationError, match="meridian_itl_ms is not allowed"):
        built(core, {"meridian_itl_ms": 20.0})


@pytest.mark.skipif(not IS_ANSWERED, reason="this vLLM answers no refusal of EngineCore's")
def test_a_stop_scope_is_refused_behind_the_rust_front_end_alone(core, monkeypatch):
    """The front end in Python matches stop strings as asked."""
    assert built(core, {"meridian_stop_scope": "answer"})
    monkeypatch.setenv(RUST, "1")
    assert built(core, {"meridian_stop_scope": "all"})
    with pytest.raises(VLLMValidationError, match="meridian_stop_scope is 'answer', expected"):
        built(core, {"meridian_stop_scope": "answer"})


@pytest.mark.parametrize("fields", [None, {}, {"kv_transfer_params": {}}, {"meridian_exit": "off"}])
def test_enginecore_builds_all_other_requests(core, fields):
    """They are vLLM's own."""
    request = built(core, fields)
    assert type(request) is upstream_request.Request
    assert request.structured_output_request is None


@pytest.mark.skipif(IS_ANSWERED, reason="this vLLM answers a refusal of EngineCore's")
def test_enginecore_of_032_builds_wrong_requests_too(core):
    """It would answer HTTP 500 and log a traceback."""
    assert built(core, {"meridian_max_think_tokens": "many"})


def lines(caplog):
    """Of the scheduler, of whatever level."""
    return [each for each in caplog.records if each.module in ("options_parser", "guard")]


@pytest.mark.usefixtures("past_the_check")
@pytest.mark.parametrize(("fields", "named"), WRONG)
def test_the_scheduler_serves_a_wrong_request_without_its_fields(demo_model, caplog, fields, named):
    """One line that names the field, and no step that "runs as stock": none did."""
    driver = driver_for(demo_model)
    driver.add(Job("wrong", PLAIN, None, 3), extra_args={**fields, "meridian_priority": -5})
    assert driver.scheduler.request_states.get("wrong").options == NO_OPTIONS
    driver.drain()
    assert len(driver.deliveries["wrong"]) == 4
    (line,) = lines(caplog)
    assert named in line.getMessage()
    assert "request wrong is served without its meridian_* fields" in line.getMessage()
    assert line.exc_info is None
    assert line.levelno == logging.WARNING
    totals = driver.scheduler.phase_counters.totals
    assert not totals.get("fallback:exception")
    ignored = {name for name in totals if name.startswith("ignored_field:")}
    known = fields.keys() - {"meridian_max_tokens"}
    assert ignored == {f"ignored_field:{name}" for name in (*known, "meridian_priority")}


@pytest.mark.usefixtures("past_the_check")
def test_a_client_cannot_fill_the_log(demo_model, caplog, monkeypatch):
    """A line a minute; each request counts."""
    driver = driver_for(demo_model)
    now_s = [0.0]
    monkeypatch.setattr(
        "meridian_patch.engine.scheduler.options_parser.time.monotonic", lambda: now_s[0]
    )
    for number in range(20):
        driver.add(Job(f"w{number}", PLAIN, None, 1), extra_args={"meridian_exit": 3})
        now_s[0] += WARN_EVERY_S / 10
    assert len(lines(caplog)) == 2
    assert driver.scheduler.phase_counters.totals["ignored_field:meridian_exit"] == 20


@pytest.mark.usefixtures("past_the_check")
def test_the_scheduler_ignores_a_stop_scope_behind_the_rust_front_end(
    demo_model, caplog, monkeypatch
):
    """Where EngineCore cannot refuse it."""
    monkeypatch.setenv(RUST, "1")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_METRICS__PORT", "0")
    driver = driver_for(demo_model)
    caplog.clear()
    driver.add(Job("r", PLAIN, None, 1), extra_args={"meridian_stop_scope": "answer"})
    (line,) = lines(caplog)
    assert "meridian_stop_scope is 'answer', expected 'all'" in line.getMessage()


@pytest.mark.parametrize(
    ("asked", "path"), product((None, "0", "1", "2"), (None, "auto", "/vllm-rs", ""))
)
def test_the_front_end_is_told_as_vllm_does(monkeypatch, tmp_path, asked, path):
    """From the two variables that vLLM reads; its "auto" looks for the binary and refuses."""
    for name, value in ((RUST, asked), ("VLLM_RUST_FRONTEND_PATH", path)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    try:
        vllms = bool(vllm_envs.VLLM_USE_RUST_FRONTEND and vllm_envs.VLLM_RUST_FRONTEND_PATH)
    except FileNotFoundError:
        vllms = True
    assert envs.has_rust_front_end(envs.environment()) is vllms
