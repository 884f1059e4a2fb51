"""What a number of GPUs serves: arithmetic over replays of one engine."""

import json

import pytest

from meridian_patch import cli
from meridian_patch.bench.simulated.fleet import Parts, best_of, fleet_of, rates_in
from meridian_patch.errors import BenchError

PARTS = Parts(
    gpus_per_engine=1, kv_bytes_per_token=100_000, nic_gbit_per_s=400, router_us_per_token=100
)


def row(
    rate: float, goodput: float, *, arm="latency", pool=400_000, usage=0.5, steady=None
) -> dict:
    """A hundred requests of 1,000 prompt and 2,000 output tokens, served at this rate."""
    values = {
        "goodput_per_s": goodput,
        "tokens_per_s": rate * 2000,
        "steady_tokens_per_s": (rate if steady is None else steady) * 2000,
        "output_tokens": 200_000,
        "prompt_tokens": 100_000,
        "steady_kv_usage_p99": usage,
        "answer_itl_p99_s": 0.012,
    }
    figures = {name: {"value": value} for name, value in values.items()}
    keys = {"workload": "s-prod", "pool_tokens": pool, "rate_per_s": rate, "arm": arm}
    return keys | {"figures": figures}


def results(*rows: dict) -> dict:
    return {
        "rows": list(rows),
        "workloads": [{"workload": "s-prod", "requests": 100}],
        "cost_model": {"name": "h100-8b-dense"},
    }


SWEEP = results(
    row(3, 2.4, usage=1.0), row(1, 1.0), row(2, 1.96, usage=0.9), row(2, 0.1, arm="stock")
)


def test_the_highest_rate_served_well_counts():
    rates = rates_in(SWEEP, "latency")
    assert [rate.rate_per_s for rate in rates] == [1, 2, 3]
    assert [rate.served_well for rate in rates] == pytest.approx([1, 0.98, 0.8])
    assert best_of(rates).rate_per_s == 2
    with pytest.raises(BenchError, match="replay lower rates"):
        best_of(rates[2:])
    # A rate above one that is not served does not count.
    assert best_of([rates[0], rates[2], rates[1]]).rate_per_s == 1


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "[" * 100_000, '{"rows": 1}', json.dumps(results(row(0, 1))), "\ufeff{}"],
    ids=lambda text: text[:12],
)
def test_a_file_of_something_else_is_one_sentence(text, tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "capacity", str(file)])
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("meridian: ")
    assert printed.count("\n") == 1


def test_mixed_results_are_refused():
    with pytest.raises(BenchError, match="2 pairs of a workload and a pool"):
        rates_in(results(row(1, 1), row(1, 1, pool=1)), "latency")
    with pytest.raises(BenchError, match="0 pairs"):
        rates_in(SWEEP, "noop")


def test_fleets_are_multiples():
    engine = best_of(rates_in(SWEEP, "latency"))
    one, eight = fleet_of(1, engine, PARTS), fleet_of(8, engine, PARTS)
    assert (one.requests_per_s, one.tokens_per_s, one.routers) == (2, 4000, 1)
    assert one.bottleneck == "the time of a step"
    # 2 requests/s of 3,000 tokens of 100 kB are 0.6 GB/s of 50 GB/s.
    assert one.nic_share == eight.nic_share == pytest.approx(0.012)
    assert (eight.requests_per_s, eight.tokens_per_s, eight.routers) == (16, 32_000, 4)
    assert eight.bottleneck == "one router process: 3.2 are busy"
    halves = Parts(2, 100_000, 400, 100)
    assert fleet_of(8, engine, halves).requests_per_s == 8
    with pytest.raises(BenchError, match="1 GPUs are less than the 2"):
        fleet_of(1, engine, halves)


def test_what_comes_out_counts_not_what_is_offered():
    """A short replay serves a burst well that no engine could keep up."""
    burst = best_of(rates_in(results(row(10, 10, steady=3)), "latency"))
    assert fleet_of(8, burst, PARTS).requests_per_s == 24
    # What came out while a queue was worked off is not more than was offered.
    late = best_of(rates_in(results(row(2, 2, steady=3)), "latency"))
    assert fleet_of(8, late, PARTS).requests_per_s == 16


def test_what_is_short_first():
    full = rates_in(results(row(1, 1, usage=0.99)), "latency")[0]
    assert fleet_of(1, full, PARTS).bottleneck == "the KV pool of the engine"
    slow = Parts(1, 100_000, 0.1, 100)
    assert "network" in fleet_of(1, full, slow).bottleneck


def test_the_command_prints_both_tables(tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(SWEEP))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "capacity", str(file), "--router-us", "100"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "simulated, cost model h100-8b-dense, arm latency, s-prod" in said
    assert "| **2** | 2.00 | 98.0% |" in said
    assert "| 64 | 64 | 128 | 256,000 | 26 |" in said
    file.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "capacity", str(file)])
    assert ended.value.code == 1
    assert "no results.json of 'meridian bench sweep'" in capsys.readouterr().err
