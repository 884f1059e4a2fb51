"""Patched engines say what stock engines say."""

import pytest
from engine_plans import AMPLE, PRESSURE
from workloads import graded, preempted_phases, token_ids

pytestmark = pytest.mark.engine

PATHS = (pytest.param("sync", marks=pytest.mark.nightly), "async")


def runs(result: dict, stage: str, name: str) -> dict:
    return result["stages"][stage]["runs"][name]


def has_probed(run: dict) -> bool:
    """Whether thoughts were measured in many steps and probed; nothing was closed."""
    counted = run["counted"]
    assert not counted.get("fallback:exception")
    ended = {name for name, n in counted.items() if n and name.startswith("exit:")}
    assert ended <= {"exit:natural", "exit:unanswered"}
    return run["planned"] > 20 and counted.get("probe:measured", 0) > 1 and len(run["probes"]) > 1


def has_measured_nothing(run: dict) -> bool:
    exits = [n for name, n in run["counted"].items() if n and name.startswith(("probe", "exit"))]
    return not (run["planned"] or run["probes"] or exits)


@pytest.mark.parametrize("path", [*PATHS, "ngram"])
def test_greedy_tokens_are_stock_in_an_ample_pool(v1_stock, v1_patched, path):
    """Without preemption, greedy outputs are token-identical on Model Runner V1."""
    stock, patched = (runs(result, path, "ample") for result in (v1_stock, v1_patched))
    assert not stock["preemptions"]
    assert not patched["preemptions"]
    assert len(token_ids(stock)) == len(AMPLE)
    assert token_ids(patched) == token_ids(stock)
    assert has_probed(patched)
    # Nearly all steps have a token and room for everybody, and no prompt.
    assert patched["passed_over"] > patched["steps"] / 2


@pytest.mark.parametrize("path", PATHS)
def test_observing_measures_a_sample(v1_patched, path):
    """All of few requests, some of many; the ends of the others are counted all the same."""
    few = runs(v1_patched, path, "ample")["counted"]
    many = runs(v1_patched, path, "pressure")["counted"]
    assert few["measured:observe"] == few["exit:natural"] == len(AMPLE)
    assert many["exit:natural"] == len(PRESSURE)
    assert 8 <= many["measured:observe"] < len(PRESSURE)


@pytest.mark.parametrize("path", [*PATHS, "ngram"])
def test_requests_without_early_exit_are_stock(v1_stock, v1_patched, path):
    """Nothing is measured for them, though it was for those before them."""
    stock, patched = (runs(result, path, "off") for result in (v1_stock, v1_patched))
    assert token_ids(patched) == token_ids(stock)
    assert has_measured_nothing(patched)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_measured_under_pressure_with_exit_off(v1_noop, path):
    """Off by configuration, with requests preempted in thought and answer."""
    noop = runs(v1_noop, path, "pressure")
    assert noop["preemptions"]
    assert has_measured_nothing(noop)


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_stock_under_pressure(v1_stock, v1_patched, path):
    """With both engines preempting, but not the same requests, the same problems are solved."""
    stock, patched = (runs(result, path, "pressure") for result in (v1_stock, v1_patched))
    assert stock["preemptions"]
    assert patched["preemptions"]
    assert graded(patched, PRESSURE, "p") == graded(stock, PRESSURE, "p")
    assert sum(graded(stock, PRESSURE, "p")) > len(PRESSURE) / 2
    assert has_probed(patched)


def test_greedy_tokens_are_stock_on_model_runner_v2(v2_stock, v2_patched):
    """On Model Runner V2 outputs are token-identical, preemptions or none."""
    for result in (v2_stock, v2_patched):
        assert result["stages"]["async"]["runner"] == "vllm.v1.worker.cpu.model_runner"
    for name in ("ample", "pressure"):
        stock, patched = (runs(result, "async", name) for result in (v2_stock, v2_patched))
        assert token_ids(patched) == token_ids(stock)
        assert has_probed(patched)
    stock, patched = (runs(result, "async", "off") for result in (v2_stock, v2_patched))
    assert token_ids(patched) == token_ids(stock)
    assert has_measured_nothing(patched)
    assert preempted_phases(runs(v2_patched, "async", "pressure"))


def test_stock_is_stock(v1_stock, v2_stock):
    """What is compared with has none of our classes."""
    for result in (v1_stock, v2_stock):
        for stage in result["stages"].values():
            assert stage["status"] == []
            assert not any("Phase" in name for name in stage["scheduler"])
