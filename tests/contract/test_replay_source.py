"""Traces on vLLM's real scheduler and KV manager: token ids, turns, what requests share."""

from dataclasses import replace
from itertools import pairwise

import pytest

from meridian_patch.bench.simulated.arms import arm_settings, named_arm
from meridian_patch.bench.simulated.source import TraceSource, session_bounds
from meridian_patch.bench.simulated.trace import History, TraceRequest
from meridian_patch.bench.simulated.workloads import WORKLOADS, draw_trace
from meridian_patch.errors import BenchError
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import play
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens

SESSION = [
    TraceRequest("a-0", 0.0, 50, 40, 20, "a", 0, 0.0, 30, "x"),
    TraceRequest("a-1", None, 12, 30, 10, "a", 1, 0.5, 0, "x", is_tool_result=True),
    TraceRequest("a-2", None, 7, 0, 15, "a", 2, 3.0, 0, "x"),
    TraceRequest("a-3", None, 9, 25, 5, "a", 3, 1.0, 0, "x"),
]
SINGLE = TraceRequest("b", 0.25, 45, 20, 30, shared_tokens=30, system="x")
TOOL_HISTORIES = [History.STRIPPED, History.KEPT, History.TOOL_LOOP]


def replay(trace, history, pool=100_000, arm="latency"):
    template = read_template_tokens()
    cost = load_cost(DEFAULT_COST)
    made = named_arm(arm)
    made = replace(made, settings=arm_settings(made, history))
    engine = ReplayEngine(made, pool // BLOCK_SIZE, cost.step_seconds, template)
    source = TraceSource(trace, template, history)
    records = {record.request.request_id: record for record in play(engine, source)}
    assert set(records) == {request.id for request in trace}
    return engine, source, records


def shortened(trace):
    """The same shape in a second."""
    return [
        replace(
            request,
            prompt_tokens=request.prompt_tokens // 40 + request.shared_tokens + 1,
            think_tokens=-(-request.think_tokens // 40),
            answer_tokens=request.answer_tokens // 40 + 1,
        )
        for request in trace
    ]


def plain(trace):
    return [replace(request, think_tokens=0) for request in trace]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_plays(workload):
    """All requests finish, with the lengths of the trace and pauses kept."""
    trace = shortened(draw_trace(workload, 40, 4.0, 1))
    history = WORKLOADS[workload].history
    _, source, records = replay(trace, history)
    template = read_template_tokens()
    for request in trace:
        record = records[request.id]
        output, start = record.request.output, record.request.answer_start
        assert record.finish_reason == "stop"
        assert start == (request.think_tokens + 1 if request.think_tokens else 0)
        answer = output[start:-1]
        if answer[: len(template.tool_call)] == list(template.tool_call):
            answer = answer[len(template.tool_call) :]
        assert len(answer) == request.answer_tokens
        if request.turn == 0:
            assert record.arrival_s == request.arrival_s
        else:
            before = records[f"{request.session}-{request.turn - 1}"]
            assert record.arrival_s == before.token_s[-1] + request.pause_s
    longest = max(len(r.request.prompt) + len(r.request.output) for r in records.values())
    bound = max(session_bounds(trace, history))
    assert longest <= bound
    assert not source.turns
    assert not source.live


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name.startswith("s-turns")])
def test_the_next_prompt_holds_what_the_history_keeps(workload):
    """Stripped: no thought; kept: all that was sampled; loop: thoughts of the same user turn."""
    trace = shortened(draw_trace(workload, 60, 8.0, 2))
    history, template = WORKLOADS[workload].history, read_template_tokens()
    _, _, records = replay(trace, history)
    in_loop = 0
    for earlier, later in pairwise(trace):
        if later.turn == 0:
            in_loop = 0
            continue
        in_loop = in_loop + 1 if later.is_tool_result else 0
        prompt, output = records[earlier.id].request.prompt, records[earlier.id].request.output
        following = records[later.id].request.prompt
        thoughts = {
            History.STRIPPED: 0,
            History.KEPT: later.turn,
            History.TOOL_LOOP: in_loop,
            History.PLAIN: 0,
        }[history]
        assert following.count(template.think_end) == thoughts
        if history in {History.KEPT, History.PLAIN} or in_loop:
            assert following[: len(prompt) + len(output)] == prompt + output
        if history is History.STRIPPED:
            assert prompt[-1] == template.think_start
            assert following[: len(prompt) - 1] == prompt[:-1]
            assert (
                following[len(prompt) - 1 :][: earlier.answer_tokens]
                == output[records[earlier.id].request.answer_start : -1]
            )


@pytest.mark.parametrize("history", TOOL_HISTORIES)
def test_later_prompts_are_the_templates(history):
    """What is earlier stands in a prompt as the template renders it."""
    template = read_template_tokens()
    _, _, records = replay([*SESSION, SINGLE], history)
    prompts = [records[request.id].request.prompt for request in SESSION]
    outputs = [records[request.id].request.output for request in SESSION]
    assert len(prompts[0]) == 50 + 6
    continued = prompts[0] + outputs[0]
    has_thought = history is not History.STRIPPED
    assert (prompts[1][: len(continued)] == continued) == has_thought
    assert prompts[1].count(template.think_end) == (1 if has_thought else 0)
    # No thinking: an empty thought in the prompt, and nothing but the answer in the output.
    assert prompts[2][-2:] == [template.think_start, template.think_end]
    assert records["a-2"].request.answer_start == 0
    assert len(outputs[2]) == 15 + 1
    assert template.think_end not in outputs[2]
    kept = {History.STRIPPED: 0, History.KEPT: 3, History.TOOL_LOOP: 0}[history]
    assert prompts[3].count(template.think_end) == kept
    call = len(template.tool_call)
    assert tuple(outputs[0][41 : 41 + call]) == template.tool_call
    assert len(outputs[1]) == 30 + 1 + 10 + 1


def test_plain_has_no_markers_of_thinking():
    template = read_template_tokens()
    _, _, records = replay(plain(SESSION), History.PLAIN)
    for record in records.values():
        tokens = {*record.request.prompt, *record.request.output}
        assert not tokens & {template.think_start, template.think_end}


def test_a_system_prompt_is_shared_by_name():
    """Requests that name it begin alike and hit it; one with another name does not."""
    wide = [
        TraceRequest(f"r{number}", number * 5.0, 200, 10, 10, shared_tokens=160, system=system)
        for number, system in enumerate(["x", "x", "y"])
    ]
    _, _, records = replay(wide, History.STRIPPED)
    hits = [records[request.id].hit_tokens for request in wide]
    assert hits == [0, 160, 0]
    first, second, third = (records[request.id].request for request in wide)
    assert first.prompt[:161] == second.prompt[:161] != third.prompt[:161]
    assert first.prompt[162:] != second.prompt[162:]


def test_tokens_depend_on_id_and_seed():
    """They are made when they are read, not when the source is started."""
    template = read_template_tokens()

    def prompts(seed):
        source = TraceSource([*SESSION, SINGLE], template, seed=seed)
        arrivals = dict(source.start())
        assert not source.turns
        return {time: request.prompt for time, request in arrivals.items()}

    assert prompts(1) == prompts(1)
    assert prompts(1)[0.25] != prompts(2)[0.25]
    assert prompts(1)[0.25][32:] != prompts(1)[0.0][32:]


def test_the_bound_is_close():
    """The longest request is not over-estimated by more than the template's share."""
    trace = shortened(draw_trace("s-turns", 40, 4.0, 1))
    for history in (History.STRIPPED, History.KEPT):
        _, _, records = replay(trace, history, pool=400_000, arm="stock")
        longest = max(len(r.request.prompt) + len(r.request.output) for r in records.values())
        assert longest <= max(session_bounds(trace, history)) <= longest + 8 * 32


@pytest.mark.parametrize(
    ("trace", "history", "words"),
    [
        ([replace(SINGLE, prompt_tokens=65_500)], History.KEPT, "request b of the trace may come"),
        (
            [SESSION[0], replace(SESSION[1], think_tokens=65_400)],
            History.STRIPPED,
            "request a-1 of the trace may come to 65",
        ),
        ([SINGLE], History.PLAIN, "request b of the trace has think_tokens 20, expected 0"),
    ],
)
def test_what_cannot_be_played_is_refused(trace, history, words):
    with pytest.raises(BenchError, match=words):
        TraceSource(trace, read_template_tokens(), history)
