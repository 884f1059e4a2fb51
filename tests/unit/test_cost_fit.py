"""Cost models: those fitted to steps, and those derived from data sheets."""

import random

import pytest

from meridian_patch import cli
from meridian_patch.bench.simulated import timed
from meridian_patch.bench.simulated.fit import Fit, fit_steps, residuals
from meridian_patch.bench.simulated.fit_command import engine_arguments, write_cost
from meridian_patch.bench.simulated.timed import bursts
from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import load_cost
from meridian_patch.replay.types import StepWork

CPU = Fit(2e-3, 1e-3, 2e-5, 0.0, 2e-7, 2e-5, 1e-8, overlap=False)
GPU = Fit(1e-3, 5e-4, 1e-6, 6e-3, 5e-8, 3e-5, 1e-9, overlap=True)
DERIVED = ("h100-8b-dense", "h200-8b-dense", "h100-32b-dense", "h200-32b-dense", "h100-30b-a3b-moe")


def draw_work(rng, most_context=60_000):
    decodes = rng.choice([0, 1, 2, 4, 8, 16, 32, 64, 128])
    context = decodes * rng.randrange(10, max(11, most_context // 64))
    attended = context
    prefill, chunks = 0, 0
    if rng.random() < 0.4 or not decodes:
        prefill, chunks = rng.choice([8, 32, 128, 512, 2048]), rng.randrange(1, 4)
        before = rng.randrange(2000)
        context += prefill + before
        attended += prefill * (before + prefill // 2)
    return StepWork(prefill, decodes, context, attended, chunks)


def timed_steps(fit, noise=0.03, outliers=0.03, number=3000):
    rng = random.Random(1)
    cost = fit.as_cost("true", "derived", "test")
    steps = []
    for _ in range(number):
        work = draw_work(rng)
        late = 10.0 if rng.random() < outliers else 1.0
        steps.append((work, cost.step_seconds(work) * rng.gauss(1, noise) * late))
    return steps


@pytest.mark.parametrize("true", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_fit_finds_what_made_the_steps(true):
    """Form and coefficients, with noise and with steps that took ten times as long."""
    fit = fit_steps(timed_steps(true))
    assert fit.overlap == true.overlap
    for name in ("fixed_s", "prefill_s", "kv_read_s_per_token", "token_s", "attention_s_per_pair"):
        assert getattr(fit, name) == pytest.approx(getattr(true, name), rel=0.15), name
    clean = timed_steps(true, noise=0, outliers=0)
    assert residuals(fit, clean).p90 < 0.05
    assert residuals(fit, clean).total == pytest.approx(1, abs=0.02)


def test_no_coefficient_is_negative():
    """What would be negative by least squares is 0."""
    shape = Fit(5e-3, 0.0, 0.0, 0.0, 0.0, 1e-5, 0.0, overlap=False)
    fit = fit_steps(timed_steps(shape, noise=0.2))
    assert min(value for value in vars(fit).values()) >= 0


def test_too_few_steps_are_refused():
    with pytest.raises(BenchError, match="99 timed steps, a fit needs at least 100"):
        fit_steps(timed_steps(CPU)[:99])


def test_steps_whose_time_ignores_tokens_are_refused():
    steps = [(work, 2e-3) for work, _ in timed_steps(CPU)]
    with pytest.raises(BenchError, match="does not grow with their tokens"):
        fit_steps(steps)


def test_a_written_cost_is_read_back(tmp_path):
    cost = CPU.as_cost("toy", "measured on a test", "made up")
    path = tmp_path / "toy.yaml"
    write_cost(path, cost)
    assert load_cost(str(path)) == cost
    assert "experts" not in path.read_text()


@pytest.mark.parametrize("name", DERIVED)
def test_derived_models_are_in_the_range_of_their_machine(name):
    """A decode step of 5 to 60 ms; prefill of 2 to 80 thousand tokens per second."""
    cost = load_cost(name)
    assert cost.provenance == "derived"
    assert cost.name == name
    assert 0.004 < cost.step_seconds(StepWork(decode_seqs=32, context_tokens=64_000)) < 0.06
    prefill = StepWork(2048, 0, 2048, 2048 * 1024, 1)
    assert 2_000 < 2048 / cost.step_seconds(prefill) < 80_000


def test_the_faster_memory_decodes_faster():
    work = StepWork(decode_seqs=32, context_tokens=64_000)
    h100, h200 = (load_cost(f"{name}-8b-dense").step_seconds(work) for name in ("h100", "h200"))
    assert h100 / h200 == pytest.approx(4.8 / 3.35, rel=0.1)


def test_more_tokens_read_more_experts():
    """One token reads its 8 of 128 experts, a large batch all of them."""
    experts = load_cost("h100-30b-a3b-moe").experts
    assert experts.read_seconds(1) == pytest.approx(experts.weights_s / 16)
    reads = [experts.read_seconds(tokens) for tokens in (1, 8, 64, 512)]
    assert reads == sorted(reads)
    assert reads[-1] == pytest.approx(experts.weights_s)


def test_rows_and_prompts_are_added_to_the_model():
    cost = CPU.as_cost("toy", "derived", "x")
    both = cost.step_seconds(StepWork(10, 3, 100, 200, 1))
    assert both == pytest.approx(2e-3 + 1e-3 + 4 * 2e-5 + 100 * 2e-7 + 13 * 2e-5 + 200 * 1e-8)


def test_a_token_cannot_use_more_experts_than_there_are(tmp_path):
    path = tmp_path / "toy.yaml"
    write_cost(path, CPU.as_cost("toy", "derived", "x"))
    with path.open("a") as file:
        file.write("experts: {weights_s: 1.0, count: 4, per_token: 8}\n")
    with pytest.raises(BenchError, match=r"toy\.yaml: experts is .*at most count"):
        load_cost(str(path))


def test_bursts_depend_on_their_seed_alone_and_fit():
    """Names differ, lengths are within bounds, half of the bursts come one by one."""
    played = list(bursts(16, 300, 5))
    assert played == list(bursts(16, 300, 5))
    requests = [request for burst in played for request in burst]
    assert len({request["id"] for request in requests}) == len(requests)
    assert max(len(r["prompt"]) + r["max_tokens"] for r in requests) <= 300
    assert sorted({len(burst) for burst in played}) == [1, 2, 4, 8, 16, 32]
    assert sum(burst[-1]["arrival_s"] == 0 for burst in played) == len(played) // 2


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["dtype"], "expected NAME=VALUE"),
        (["max_num_seqs=many"], "max_num_seqs is 'many', expected a whole number"),
        (["max_num_seqs=true"], "max_num_seqs is True, expected a whole number"),
        (["max_model_len=0"], "max_model_len is 0, expected a whole number"),
    ],
)
def test_a_wrong_engine_argument_is_one_sentence(demo_model, texts, words):
    with pytest.raises(BenchError, match=words):
        engine_arguments(demo_model, texts)


def test_ctrl_c_is_one_sentence(demo_model, monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(timed, "run_timed_engine", interrupted)
    monkeypatch.setattr("meridian_patch.bench.interrupts.end_like_ctrl_c", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["bench", "fit-cost", "--model", str(demo_model), "--out", str(tmp_path / "c.yaml")]
        )
    assert ended.value.code == 130
    assert capsys.readouterr().err == "meridian: interrupted, nothing was written\n"


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(BenchError, match=r"no config\.json in it"):
        engine_arguments(tmp_path, [])
