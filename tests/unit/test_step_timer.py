"""What a step took, where the engine launches one step before it takes another's output."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from meridian_patch.engine import wire
from meridian_patch.engine.scheduler.step_timer import StepTimer, graph_tokens
from meridian_patch.policy.step_time import StepShape, StepTimeModel

RECORDING = Path(__file__).parents[1] / "support" / "references" / "h100_steps.txt"
ROWS, GRAPH = 32, 256


def shape_of(prefill: int, context: int = 4000, attended: int = 0) -> StepShape:
    return StepShape(prefill, ROWS, context, attended)


def play(steps):
    """Times of steps, two of which are in flight, as EngineCore's loop makes them.

    Args:
        steps: prefill tokens, and milliseconds of the launch and of the device.
    """
    model = StepTimeModel()
    timer, now, free, found = StepTimer(model.seconds), 0.0, 0.0, []
    before = None
    for prefill, launch, device in steps:
        output = object()
        timer.scheduled(output, shape_of(prefill), now)
        begin, now = now, now + launch
        timer.launched(output, now)
        # The device runs what it has been given while the rest is launched.
        due = max(free, begin) + max(device, launch)
        if before is not None:
            now = max(now, before[1])
            found.append(timer.ended(before[0], now))
            model.observe(*found[-1])
        before, free = (output, due), due
    return [seconds for _, seconds in found]


def test_steps_that_the_device_bounds_take_its_time():
    """Launches are short, and the engine waits for the device."""
    assert play([(0, 1.0, 10.0)] * 8)[2:] == pytest.approx([10.0] * 5)


def test_steps_that_launches_bound_take_the_launch():
    """The device waits for the engine, whatever the step's own output waited for."""
    assert play([(64, 20.0, 5.0)] * 8)[2:] == pytest.approx([20.0] * 5)


def test_a_long_launch_counts_for_the_step_that_was_launched():
    """Not for the one whose output was late by it; no time is lost and none counts twice."""
    steps = [(0, 1.0, 10.0)] * 4 + [(512, 30.0, 30.0)] + [(0, 1.0, 10.0)] * 4
    seconds = play(steps)
    assert seconds[4] >= 30.0
    assert max(seconds[:4] + seconds[5:]) <= 11.0
    assert sum(seconds[1:]) == pytest.approx(sum(each[2] for each in steps[1:-1]), abs=11)


def recorded():
    for line in RECORDING.read_text().splitlines():
        if not line.startswith("#"):
            prefill, context, attended, milliseconds = line.split()
            yield shape_of(int(prefill), int(context), int(attended)), float(milliseconds) / 1e3


def model_of_the_recording(*, sees_launches: bool) -> StepTimeModel:
    """A model that learnt the recording.

    A prompt's launch ends where the output before is taken.
    """
    model, steps, now = StepTimeModel(), list(recorded()), 0.0
    timer = StepTimer(model.seconds)
    model.graph_tokens = GRAPH
    outputs = [SimpleNamespace() for _ in steps]
    timer.scheduled(outputs[0], steps[0][0], now)
    for place, (_, seconds) in enumerate(steps[:-1]):
        following = outputs[place + 1]
        timer.scheduled(following, steps[place + 1][0], now)
        if sees_launches and steps[place + 1][0].prefill_tokens:
            timer.launched(following, now + max(seconds - 0.0005, 0.0))
        now += seconds
        model.observe(*timer.ended(outputs[place], now))
    return model


def test_prompts_on_a_real_gpu_take_what_they_took():
    """Within the graph about a decode, above it at least a launch, then what their tokens take."""
    model = model_of_the_recording(sees_launches=True)
    for tokens, least_ms, most_ms in ((64, 7, 12), (128, 7, 14), (512, 22, 45), (2048, 45, 75)):
        attended = tokens * (tokens + 1) // 2
        seconds = model.seconds(shape_of(tokens, 4000 + tokens, attended))
        assert least_ms < 1e3 * seconds < most_ms, tokens
    assert model.decode_seconds(shape_of(0)) == pytest.approx(0.0072, rel=0.05)


def test_without_launches_prompts_would_seem_to_take_no_time():
    """What was wrong: 512 tokens count as 5 ms, and the step cut lets any amount of them in."""
    model = model_of_the_recording(sees_launches=False)
    assert model.seconds(shape_of(512, 4512, 131_000)) < 0.015


@pytest.mark.parametrize(
    ("mode", "most", "expected"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, 512, 512),
        (CUDAGraphMode.PIECEWISE, 256, 256),
        (CUDAGraphMode.FULL_DECODE_ONLY, 512, None),
        (CUDAGraphMode.NONE, None, None),
        (CUDAGraphMode.NONE, 512, None),
        (None, 512, None),
    ],
)
def test_up_to_which_size_a_graph_runs_prompts(mode, most, expected):
    """Graphs of steps that only decode run no prompt."""
    compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=most)
    config = SimpleNamespace(additional_config={}, compilation_config=compilation)
    assert graph_tokens(config) == expected
    config.additional_config = {wire.GRAPH_TOKENS: 64}
    assert graph_tokens(config) == 64


def test_a_decode_that_outlasts_the_next_launch_is_not_shortened():
    """The device bounds it then: a decode time that was learnt too low is corrected."""
    model, timer, now = StepTimeModel(), None, 0.0
    for _ in range(40):
        model.observe(shape_of(0), 0.026)
    timer = StepTimer(model.seconds)
    first, second = object(), object()
    timer.scheduled(first, shape_of(0), now)
    timer.launched(first, now + 0.001)
    timer.scheduled(second, shape_of(512), now + 0.001)
    timer.launched(second, now + 0.026)
    assert timer.ended(first, now + 0.038)[1] == pytest.approx(0.038)


def test_a_grammar_that_waited_for_another_step_says_nothing_of_a_launch():
    """Its sampling was deferred until the output of an earlier step was there."""
    timer = StepTimer(lambda _: 0.01)
    outputs = [object() for _ in range(3)]
    timer.scheduled(outputs[0], shape_of(0), 0.0)
    timer.scheduled(outputs[1], shape_of(0), 0.001)
    timer.scheduled(outputs[2], shape_of(64), 0.002)
    timer.ended(outputs[0], 0.016)
    timer.launched(outputs[2], 0.017)
    assert timer.ended(outputs[1], 0.032)[1] == pytest.approx(0.016)
