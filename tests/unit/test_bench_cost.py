"""Cost models: what a step costs, and what is said of a file that cannot be used."""

import pytest
import yaml

from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.types import StepWork

GOOD = {
    "version": 1,
    "name": "toy",
    "provenance": "derived",
    "derivation": "made up for a test",
    "fixed_s": 0.5,
    "weights_s": 1.0,
    "kv_read_s_per_token": 0.25,
    "token_s": 2.0,
    "attention_s_per_pair": 0.125,
}


def load(folder, **changes):
    path = folder / "toy.yaml"
    values = {key: value for key, value in (GOOD | changes).items() if value is not None}
    path.write_text(yaml.safe_dump(values))
    return load_cost(str(path))


def test_a_step_costs_the_slower_of_memory_and_compute(tmp_path):
    """fixed + max(weights + KV, tokens + attention); an empty step costs nothing."""
    cost = load(tmp_path)
    assert cost.step_seconds(StepWork()) == 0
    assert cost.step_seconds(StepWork(decode_seqs=1, context_tokens=100)) == 0.5 + 1 + 25
    prefill = StepWork(prefill_tokens=10, context_tokens=10, attended_tokens=55)
    assert cost.step_seconds(prefill) == 0.5 + 20 + 55 / 8


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(BenchError, match="unknown cost model 'xxx"):
        load_cost("x" * 5000)
    with pytest.raises(BenchError, match="cannot be read: File name too long"):
        load_cost("x" * 5000 + ".yaml")


def test_numbers_may_have_an_exponent_alone(tmp_path):
    """YAML 1.2 reads 1e-3 as a number, as everybody does but YAML 1.1."""
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(GOOD).replace("fixed_s: 0.5", "fixed_s: 5e-1"))
    assert load_cost(str(path)).fixed_s == 0.5


def test_packaged_model_says_where_it_comes_from():
    """The default is derived, and in the range that its machine is known for."""
    cost = load_cost(DEFAULT_COST)
    assert cost.provenance == "derived"
    assert "H100" in cost.derivation
    assert 0.005 < cost.step_seconds(StepWork(decode_seqs=32, context_tokens=64_000)) < 0.015
    prefill = StepWork(prefill_tokens=8192, context_tokens=8192, attended_tokens=8192 * 4096)
    assert 0.15 < cost.step_seconds(prefill) < 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_s": 0.0}, ["token_s is 0.0", "greater than 0"]),
        ({"token_s": None}, ["token_s is missing"]),
        ({"fixed_s": -1.0}, ["fixed_s is -1.0"]),
        ({"weights_s": "fast"}, ["weights_s is 'fast'"]),
        ({"provenance": "guessed"}, ["provenance is 'guessed'", "measured on"]),
        ({"speed": 1.0}, ["unknown key speed", "known here: version"]),
        ({"version": 2}, ["version is 2, expected 1"]),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, changes, words):
    """The message names the file, the field and what was expected."""
    with pytest.raises(BenchError) as raised:
        load(tmp_path, **changes)
    for word in ["toy.yaml", *words]:
        assert word in str(raised.value)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BenchError, match=r"unknown cost model 'h200'; known: .*h100-8b-dense"):
        load_cost("h200")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BenchError, match=r"none\.yaml does not exist"):
        load_cost(str(tmp_path / "none.yaml"))


def test_a_step_above_the_graph_is_launched_for_most_of_its_time():
    """It takes the launch at least, and longer where its tokens do; within the graph none shows."""
    cost = load_cost("h100-8b-measured")
    within, above, large = (StepWork(tokens, 0, tokens, 0) for tokens in (256, 257, 8192))
    assert cost.launch_seconds(within) == 0.0
    assert cost.step_seconds(within) < cost.launch_s / 2
    assert cost.step_seconds(above) == cost.launch_s
    assert cost.step_seconds(large) > 5 * cost.launch_s
    for work in (above, large):
        assert 0.5 < cost.launch_seconds(work) / cost.step_seconds(work) < 1.0
