"""The emulated device without an engine: its clock, the shape of its steps, its lateness."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from meridian_patch.emulation import device as devices
from meridian_patch.emulation.clock import DeviceClock
from meridian_patch.emulation.device import check_machine, check_supported, load_device
from meridian_patch.emulation.ledger import (
    WARM_UP_STEPS,
    Ledger,
    late_share,
    read_counters,
)
from meridian_patch.emulation.options import WORKER, split_emulation
from meridian_patch.emulation.report import ReportFile
from meridian_patch.emulation.shape import StepShapes
from meridian_patch.errors import BenchError, ConfigError
from meridian_patch.replay.types import StepWork

DEVICE = "h100-32b-dense"


def test_steps_run_one_after_the_other() -> None:
    """A step begins when it is submitted, or when the one before it ends."""
    clock = DeviceClock()
    first = clock.submit(10.0, 0.5)
    second = clock.submit(10.1, 0.5)
    third = clock.submit(12.0, 0.25)
    assert (first.start_s, first.due_s, first.is_overlapped) == (10.0, 10.5, False)
    assert (second.start_s, second.due_s, second.is_overlapped) == (10.5, 11.0, True)
    assert (third.start_s, third.due_s, third.is_overlapped) == (12.0, 12.25, False)


def scheduled(tokens, new=(), cached=(), resumed=(), all_tokens=None, finished=()):
    """A scheduler's output; ``new`` and ``cached`` hold name and computed tokens."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, num_computed_tokens=computed, prompt_len=prompt, prefill_token_ids=more
            )
            for name, computed, prompt, more in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            num_computed_tokens=[computed for _, computed in cached],
            resumed_req_ids=set(resumed),
            all_token_ids=all_tokens or {},
        ),
        finished_req_ids=set(finished),
    )


def test_a_prompt_is_a_prefill_until_it_is_computed() -> None:
    """In chunks, beside a decode; then it decodes."""
    shapes = StepShapes()
    assert shapes.read(scheduled({"a": 6}, new=[("a", 0, 10, None)])) == StepWork(6, 0, 6, 21, 1)
    more = scheduled({"a": 4, "b": 1}, new=[("b", 7, 8, None)], cached=[("a", 6)])
    assert shapes.read(more) == StepWork(4, 1, 18, 42, 1)
    both = scheduled({"a": 1, "b": 1}, cached=[("a", 10), ("b", 8)])
    assert shapes.read(both) == StepWork(0, 2, 20, 20, 0)


def test_drafts_are_no_prefill() -> None:
    """Several tokens beyond the prompt are checked beside the one that is computed."""
    shapes = StepShapes()
    shapes.read(scheduled({"a": 10}, new=[("a", 0, 10, None)]))
    work = shapes.read(scheduled({"a": 4}, cached=[("a", 10)]))
    assert work == StepWork(0, 1, 14, 11 + 12 + 13 + 14, 0, draft_tokens=3)


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_what_was_preempted_is_computed_as_a_prefill(runner: str) -> None:
    """With its output so far: V1 resumes a cached request, V2 gets a new one."""
    shapes = StepShapes()
    shapes.read(scheduled({"a": 10}, new=[("a", 0, 10, None)]))
    if runner == "V1":
        tokens = {"a": list(range(15))}
        step = scheduled({"a": 8}, cached=[("a", 0)], resumed=["a"], all_tokens=tokens)
    else:
        step = scheduled({"a": 8}, new=[("a", 0, 10, list(range(15)))])
    assert shapes.read(step).prefill_tokens == 8
    assert shapes.read(scheduled({"a": 7}, cached=[("a", 8)])).prefill_tokens == 7
    assert shapes.read(scheduled({"a": 1}, cached=[("a", 15)])) == StepWork(0, 1, 16, 16)


def test_a_finished_request_is_forgotten() -> None:
    shapes = StepShapes()
    shapes.read(scheduled({"a": 10}, new=[("a", 0, 10, None)]))
    assert shapes.read(scheduled({}, finished=["a"])) == StepWork()
    assert not shapes._prefills


def test_a_token_may_stand_for_several() -> None:
    """A step stands for as many steps, beside contexts that are as many times longer."""
    once, eight = load_device(DEVICE), load_device(DEVICE, "8")
    work = StepWork(prefill_tokens=4, decode_seqs=2, context_tokens=100, attended_tokens=50)
    longer = replace(work, context_tokens=800, attended_tokens=400)
    assert eight.step_seconds(work) == pytest.approx(8 * once.step_seconds(longer))
    assert once.step_seconds(work) == once.cost.step_seconds(work)
    assert (once.kv_blocks(32), eight.kv_blocks(32)) == (280_000 // 32 + 1, 35_000 // 32 + 1)
    assert once.provenance == "emulated h100-32b-dense (derived)"
    assert eight.provenance == "emulated h100-32b-dense (derived, 1 token for 8)"


def a_ledger(*steps: tuple[float, float, float], is_prefill: bool = False) -> Ledger:
    """Steps of 10 ms after the warm-up: when asked for, ready and handed over, from their start."""
    ledger, clock = Ledger(), DeviceClock()
    for asked_s, ready_s, handed_s in (*((0.0, 0.5, 9.0),) * WARM_UP_STEPS, *steps):
        window = clock.submit(0.0, 0.01)
        ledger.record(
            window,
            is_prefill=is_prefill,
            asked_s=window.start_s + asked_s,
            ready_s=window.start_s + ready_s,
            handed_s=window.start_s + handed_s,
            work_s=ready_s - asked_s,
        )
    return ledger


def test_lateness_and_oversleeping_are_counted_apart() -> None:
    """Work beyond the deadline is late; waking beyond it is not; the warm-up counts for nothing."""
    ledger = a_ledger((0.0, 0.004, 0.0101), (0.0, 0.012, 0.012))
    assert (ledger.decode.steps, ledger.prefill.steps) == (2, 0)
    assert ledger.decode.device_s == pytest.approx(0.02)
    assert ledger.decode.overslept_s == pytest.approx(0.0001)
    assert (ledger.decode.late_steps, ledger.decode.late_s) == (1, pytest.approx(0.002))
    assert ledger.late_share == pytest.approx(0.105)


def test_an_output_asked_for_late_is_late_by_its_work_alone() -> None:
    """The engine came 5 ms after the deadline: a device would have had it."""
    ledger = a_ledger((0.015, 0.017, 0.017))
    assert ledger.decode.late_s == pytest.approx(0.002)
    assert a_ledger((0.015, 0.015, 0.015)).late_share == 0


def test_a_machine_that_is_late_by_more_than_a_hundredth_is_not_certified() -> None:
    in_time = (0.0, 0.004, 0.01)
    assert a_ledger(*[in_time] * 99, (0.0, 0.0199, 0.0199)).is_certified
    slow = a_ledger(*[in_time] * 99, (0.0, 0.021, 0.021))
    assert not slow.is_certified
    assert slow.sentence().startswith(
        "not certified: this machine is too slow for this device (1.10% of its time; prefill late "
        "0 % in 0 of 0 steps"
    )
    assert a_ledger().sentence() == "not certified: no step has run since the warm-up"


def test_the_report_holds_what_a_bench_reads(tmp_path) -> None:
    path = tmp_path / "report.json"
    report, ledger = ReportFile(path), a_ledger((0.0, 0.012, 0.012), is_prefill=True)
    report.begin({"device": DEVICE})
    assert late_share(read_counters(path)) is None
    report.write_sometimes(ledger, 0.5)
    ledger = a_ledger((0.0, 0.013, 0.013))
    report.write_sometimes(ledger, 1.0)
    data = json.loads(path.read_text())
    assert (data["device"], data["prefill"]["late_s"]) == (DEVICE, pytest.approx(0.002))
    ledger = a_ledger((0.0, 0.013, 0.013), (0.0, 0.005, 0.01))
    report.write(ledger, 1.0)
    assert late_share(read_counters(path)) == pytest.approx(0.15)
    path.unlink()
    # An engine that has nothing to do goes on asking.
    report.write(ledger, 9.0)
    assert not path.exists()
    ReportFile(path, rank=2).begin({})
    path.with_name("report-2.json").replace(path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    path.write_text("{}")
    with pytest.raises(BenchError, match=r"report .*report\.json cannot be read"):
        read_counters(path)


def a_cost_file(path, **changes):
    data = load_device(DEVICE).cost.model_dump(exclude_none=True) | changes
    wanted = {name: value for name, value in data.items() if value is not None}
    path.write_text(yaml.safe_dump(wanted))
    return str(path)


def test_a_cost_model_that_says_too_little_is_refused(tmp_path) -> None:
    """One sentence names the file and the field."""
    with pytest.raises(BenchError, match=r"unknown cost model 'h300'; known: .*h100-32b-dense"):
        load_device("h300")
    lame = a_cost_file(tmp_path / "lame.yaml", token_s=None)
    with pytest.raises(BenchError, match=r"lame\.yaml: token_s is missing"):
        load_device(lame)
    endless = load_device(a_cost_file(tmp_path / "endless.yaml", kv_tokens=None))
    with pytest.raises(BenchError, match=r"endless\.yaml: kv_tokens is missing"):
        endless.kv_blocks(32)
    with pytest.raises(ConfigError, match=r"stand for .0. tokens .* whole number above 0"):
        load_device(DEVICE, "0")


def vllm_config(**changes) -> SimpleNamespace:
    """What is looked at of vLLM's configuration; keys are dotted paths with two underscores."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
            distributed_executor_backend="uni",
        ),
        model_config=SimpleNamespace(is_moe=False, runner_type="generate"),
        speculative_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(*((getattr(config, part), name) if name else (config, part)), value)
    return config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size is above 1"),
        ({"parallel_config__tensor_parallel_size": 2}, "--tensor-parallel-size is above 1"),
        (
            {"parallel_config__data_parallel_size": 2, "model_config__is_moe": True},
            "--data-parallel-size is above 1 for a mixture of experts",
        ),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "has a draft model"),
        ({"model_config__runner_type": "pooling"}, "generates no text"),
        ({"parallel_config__distributed_executor_backend": "mp"}, "the executor is 'mp'"),
    ],
)
def test_what_the_cost_model_does_not_cover_is_refused(changes, says: str) -> None:
    device = load_device(DEVICE)
    with pytest.raises(ConfigError, match=says) as refusal:
        check_supported(device, vllm_config(**changes))
    assert str(refusal.value).count("\n") == 0
    assert DEVICE in str(refusal.value)


def test_what_it_covers_is_served() -> None:
    device = load_device(DEVICE)
    check_supported(device, vllm_config())
    check_supported(device, vllm_config(speculative_config=SimpleNamespace(method="ngram")))
    check_supported(device, vllm_config(parallel_config__data_parallel_size=2))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(devices, "_GPU_FILES", ())


def test_a_real_gpu_is_not_left_idle(monkeypatch, tmp_path) -> None:
    gpu = tmp_path / "nvidiactl"
    gpu.touch()
    monkeypatch.setattr(devices, "_GPU_FILES", (tmp_path / "kfd", gpu))
    with pytest.raises(ConfigError, match=r"has a GPU .*nvidiactl.*add --emulate-beside-gpu"):
        split_emulation(["m", "--emulate", DEVICE])
    assert split_emulation(["m", "--emulate", DEVICE, "--emulate-beside-gpu"]) is not None
    check_machine(is_allowed_beside_gpu=True)


@pytest.mark.usefixtures("no_gpu")
def test_serve_adds_the_worker_and_the_devices_pool(tmp_path) -> None:
    """What the user gives stays, and comes last: vLLM takes the last of two equal options."""
    given = ["m", "--emulate", DEVICE, "--emulate-tokens", "8", "--port", "8001"]
    found = split_emulation([*given, "--emulate-report", str(tmp_path / "r.json")])
    options = ["--worker-cls", WORKER, "--block-size", "32", "--num-gpu-blocks-override", "1094"]
    assert found.arguments == ["m", *options, "--port", "8001"]
    assert found.environment["MERIDIAN_PATCH_EMULATE"] == DEVICE
    assert found.environment["MERIDIAN_PATCH_EMULATE_TOKENS"] == "8"
    assert found.environment["MERIDIAN_PATCH_EMULATE_REPORT"] == str(tmp_path / "r.json")
    assert found.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    for words in ("no GPU runs here", "derived", "1094 blocks", "stands for 8"):
        assert words in found.banner


@pytest.mark.usefixtures("no_gpu")
def test_serve_keeps_a_pool_of_the_users_own() -> None:
    own = ["--block_size=64", "--num-gpu-blocks-override", "9"]
    found = split_emulation(["m", "--emulate", DEVICE, *own])
    assert found.arguments == ["m", "--worker-cls", WORKER, *own]
    found = split_emulation(["m", "--emulate", DEVICE, "--block-size", "64"])
    assert found.arguments[3:5] == ["--num-gpu-blocks-override", "4376"]
    with pytest.raises(ConfigError, match="--block-size is '48', expected a multiple of 32"):
        split_emulation(["m", "--emulate", DEVICE, "--block-size", "48"])


@pytest.mark.usefixtures("no_gpu")
def test_serve_without_a_model_serves_the_tiny_reasoner() -> None:
    arguments = split_emulation(["--emulate", DEVICE, "--port", "8001"]).arguments
    assert arguments[0].endswith("tiny-reasoner")
    assert arguments[-2:] == ["--port", "8001"]
    assert "--enforce-eager" in arguments


def test_without_a_device_nothing_changes() -> None:
    assert split_emulation(["m", "--port", "8001"]) is None
    with pytest.raises(ConfigError, match="needs --emulate DEVICE"):
        split_emulation(["m", "--emulate-tokens", "4"])
