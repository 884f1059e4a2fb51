"""A real server and a real `vllm.LLM`: wrong fields are refused, and how thinking ended is told."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from core_reports import THINK_END_ID
from run_engine import clean_environment, log_tail
from workloads import THINK_END, engine_arguments

from meridian_patch.engine.status import read_all
from meridian_patch.operate.doctor.finding import State
from meridian_patch.operate.doctor.server import check_server
from meridian_patch.operate.http_client import ServerClient
from meridian_patch.operate.scrape import parse
from meridian_patch.operate.top.view import view

pytestmark = pytest.mark.engine

QUESTION = "p=7, q=p+5, r=q*3. r?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"messages": MESSAGES, "max_tokens": 300},
    COMPLETIONS: {"prompt": QUESTION, "max_tokens": 300},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 300},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 300},
}
EXPECTED = "vllm_xargs field meridian_exit is 'on', expected 'off', 'observe' or 'enforce'"


@pytest.fixture
def server(served):
    return served


def post(server, path, **body) -> tuple[int, str]:
    return server.post(path, BODIES[path] | {"temperature": 0} | body)


def whole(server, path, **body) -> dict:
    status, text = post(server, path, **body)
    assert status == 200, text
    return json.loads(text)


def events(server, path, **body) -> list[dict]:
    """What a stream says, event by event."""
    status, text = post(server, path, stream=True, **body)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


TIMES = ("think_ms", "ttfat_ms", "answer_ms", "preemptions")


def untimed(summary: dict) -> dict:
    """A summary without what differs from run to run."""
    return {key: value for key, value in summary.items() if key not in TIMES}


def told(events: list[dict]) -> dict[int, dict]:
    """Choice -> its summary; it stands in the chunk that ends the choice, and nowhere else."""
    choices = [choice for event in events for choice in event["choices"]]
    assert all(choice["finish_reason"] for choice in choices if "meridian" in choice)
    return {each["index"]: untimed(each["meridian"]) for each in choices if "meridian" in each}


@pytest.mark.parametrize("is_streamed", (False, True), ids=("whole", "stream"))
@pytest.mark.parametrize("path", (CHAT, COMPLETIONS, RESPONSES))
def test_a_wrong_field_is_http_400(server, path, is_streamed):
    """The message names field, value and expectation, and a stream does not begin."""
    xargs = {"meridian_exit": "on", "somebody_elses": 1}
    status, text = post(server, path, stream=is_streamed, vllm_xargs=xargs)
    error = json.loads(text)["error"]
    assert status == error["code"] == 400
    assert error["param"] == "vllm_xargs"
    assert EXPECTED in error["message"]


@pytest.mark.parametrize("is_streamed", (False, True), ids=("whole", "stream"))
@pytest.mark.parametrize("path", (CHAT, COMPLETIONS, RESPONSES))
def test_a_wrap_up_that_cannot_be_forced_is_http_400(server, path, is_streamed):
    """The served tokenizer and its markers are asked, before a stream begins."""
    xargs = {"meridian_wrap_up": f"so {THINK_END}"}
    status, text = post(server, path, stream=is_streamed, vllm_xargs=xargs)
    assert status == 400
    message = json.loads(text)["error"]["message"]
    assert "vllm_xargs field meridian_wrap_up is 'so </think>', expected text without" in message


@pytest.mark.parametrize("is_streamed", (False, True), ids=("whole", "stream"))
@pytest.mark.parametrize("path", (CHAT, COMPLETIONS, RESPONSES))
def test_a_reserve_that_leaves_nothing_to_think_is_http_400(server, path, is_streamed):
    """Field, value and the request's own bound, by whatever name, before a stream begins."""
    status, text = post(
        server, path, stream=is_streamed, vllm_xargs={"meridian_answer_reserve": 300}
    )
    assert status == 400
    message = json.loads(text)["error"]["message"]
    assert "meridian_answer_reserve is 300, expected less than max_tokens, which is 300" in message


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS, RESPONSES))
def test_by_default_a_field_that_takes_from_others_is_http_400(server, path):
    """No client goes before an equal one because it says so."""
    status, text = post(server, path, vllm_xargs={"meridian_priority": -1})
    assert status == 400
    message = json.loads(text)["error"]["message"]
    assert "vllm_xargs field meridian_priority is not allowed on this server" in message


def test_an_endpoint_without_a_patch_of_its_own_refuses_too(server):
    """The input processor stands behind all of them."""
    status, text = post(server, "/v1/messages", vllm_xargs={"meridian_exit": "on"})
    assert status == 400
    assert EXPECTED in text


def test_what_is_refused_never_reaches_the_scheduler(server):
    """It would count a wrong field as a failing step."""
    post(server, CHAT, vllm_xargs={"meridian_min_think_tokens": -1})
    metrics = server.get("/metrics").splitlines()
    failed = [line for line in metrics if "fallbacks_total{" in line and '"exception"' in line]
    assert failed
    assert all(line.endswith(" 0.0") for line in failed)


def test_chat_tells_how_thinking_ended(server):
    """Whole and streamed say the same, and count the tokens that the client sees."""
    reply = whole(server, CHAT, vllm_xargs={"meridian_exit": "observe"}, return_token_ids=True)
    (choice,) = reply["choices"]
    summary = choice["meridian"]
    assert summary["exit_reason"] == "natural"
    thought = choice["message"]["content"].partition(THINK_END)
    assert thought[1]
    assert 0 < summary["think_tokens"] < len(choice["token_ids"])
    assert reply["kv_transfer_params"] is None
    assert told(events(server, CHAT)) == {0: untimed(summary)}
    # What is said besides must not depend on us.
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events(server, CHAT))
    assert text == choice["message"]["content"]


def test_it_tells_what_ended_thinking_and_what_would_have(server):
    """A cap closes the thought where it is enforced, and is told beside the end where it is not."""
    cap = {"meridian_max_think_tokens": 8, "meridian_min_think_tokens": 0}
    seen = {
        mode: whole(server, CHAT, vllm_xargs=cap | {"meridian_exit": mode})["choices"][0][
            "meridian"
        ]
        for mode in ("observe", "enforce")
    }
    assert seen["enforce"]["exit_reason"] == "hard_cap"
    assert seen["observe"]["exit_reason"] == "natural"
    assert seen["observe"]["would_exit"]["exit_reason"] == "hard_cap"
    assert 8 <= seen["enforce"]["think_tokens"] < seen["observe"]["think_tokens"]
    assert 8 <= seen["observe"]["would_exit"]["think_tokens"] < seen["observe"]["think_tokens"]


def test_it_tells_what_could_not_be_enforced(server):
    """The model's thoughts are shorter than the floor, warm-up and window that are configured."""
    asked = {"meridian_exit": "enforce", "meridian_eat_delta": 8.0}
    (choice,) = whole(server, CHAT, vllm_xargs=asked)["choices"]
    assert choice["meridian"]["exit_reason"] == "natural"
    assert choice["meridian"]["not_enforced"] == {"eat": "floor", "rpdi": "floor"}
    assert told(events(server, CHAT, vllm_xargs=asked)) == {0: untimed(choice["meridian"])}
    asked["meridian_min_think_tokens"] = 0
    (choice,) = whole(server, CHAT, vllm_xargs=asked)["choices"]
    assert choice["meridian"]["not_enforced"] == {"eat": "warm_up", "rpdi": "warm_up"}
    (cut,) = whole(server, CHAT, max_tokens=5, vllm_xargs=asked)["choices"]
    assert untimed(cut["meridian"]) == {
        "exit_reason": "unanswered",
        "think_tokens": 5,
        "not_enforced": {"eat": "warm_up", "rpdi": "warm_up"},
    }
    (plain,) = whole(server, CHAT)["choices"]
    assert "not_enforced" not in plain["meridian"]


def test_a_thought_cut_short_is_unanswered(server):
    """Its times are told, and its tokens are in the usage; the metrics count its request."""
    reply = whole(server, CHAT, max_tokens=5)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert set(choice["meridian"]) == {"exit_reason", "think_tokens", "think_ms", "preemptions"}
    assert reasoning(reply["usage"]) == 5
    unanswered = {"exit_reason": "unanswered", "think_tokens": 5}
    assert untimed(choice["meridian"]) == unanswered
    assert told(events(server, CHAT, max_tokens=5)) == {0: unanswered}
    name = "meridian_unanswered_requests_total{"
    counted = [line for line in server.get("/metrics").splitlines() if line.startswith(name)]
    (by_length,) = (line for line in counted if 'finish_reason="length"' in line)
    assert float(by_length.rpartition(" ")[2]) >= 2


def test_a_stop_string_leaves_it_in(server):
    """Such a request is ended by the API server, and its EngineCore has no last word."""
    (choice,) = whole(server, CHAT)["choices"]
    answer = choice["message"]["content"].partition(THINK_END)[2]
    (cut,) = whole(server, CHAT, stop=THINK_END + answer[:1])["choices"]
    assert cut["stop_reason"] == THINK_END + answer[:1]
    assert untimed(cut["meridian"]) == untimed(choice["meridian"])


@pytest.mark.parametrize("is_streamed", (False, True), ids=("whole", "stream"))
@pytest.mark.parametrize("path", (CHAT, COMPLETIONS, RESPONSES))
def test_stop_strings_count_where_the_request_says(server, path, is_streamed):
    """Everywhere as in stock, or in the answer only: its first character is in the thought, too."""
    own = {"prompt": chat_prompt(server)} if path == COMPLETIONS else {}

    def said(**body):
        if is_streamed:
            return "".join(map(piece_of, events(server, path, **own, **body)))
        response = whole(server, path, **own, **body)
        if path == RESPONSES:
            return "".join(part["text"] for each in response["output"] for part in each["content"])
        (choice,) = response["choices"]
        assert "stop" not in body or choice["stop_reason"] == body["stop"]
        return choice["message"]["content"] if path == CHAT else choice["text"]

    thought, marker, answer = said().partition(THINK_END)
    stop = answer[0]
    assert stop in thought
    scoped = {
        scope: said(stop=stop, vllm_xargs={"meridian_stop_scope": scope})
        for scope in ("all", "answer")
    }
    assert scoped == {"all": thought.partition(stop)[0], "answer": thought + marker}


def piece_of(event: dict) -> str:
    """Text of one event of a stream, of any endpoint."""
    if "choices" not in event:
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    (choice,) = event["choices"]
    return (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]


def test_completions_tell_it_per_choice(server):
    """Two prompts, two samples each: four choices, each with its own."""
    prompt = chat_prompt(server)
    body = {"prompt": [prompt, prompt], "n": 2, "temperature": 1.0}
    choices = whole(server, COMPLETIONS, **body)["choices"]
    ended = [THINK_END in choice["text"] for choice in choices]
    assert [("exit_reason" in choice["meridian"]) for choice in choices] == ended
    assert any(ended)
    streamed = events(server, COMPLETIONS, **body)
    texts = {}
    for event in streamed:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert set(texts) == {0, 1, 2, 3}
    seen = {i for i, summary in told(streamed).items() if "exit_reason" in summary}
    assert seen == {i for i, text in texts.items() if THINK_END in text}


def test_responses_tell_it(server):
    """In the response, and in the last event of a stream."""
    response = whole(server, RESPONSES)
    assert response["meridian"]["exit_reason"] == "natural"
    last = events(server, RESPONSES)[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    assert untimed(last["response"]["meridian"]) == untimed(response["meridian"])


def reasoning(usage: dict) -> int:
    return usage["completion_tokens_details"]["reasoning_tokens"]


def thought_tokens(choice: dict) -> int:
    """Tokens of a choice's thought, by its token ids: the template opens it."""
    ids = choice["token_ids"]
    return ids.index(THINK_END_ID) if THINK_END_ID in ids else len(ids)


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS))
def test_usage_counts_reasoning_tokens(server, path):
    """By token ids, summed over the choices; without any reasoning parser."""
    body = {"n": 2, "temperature": 1.0, "seed": 7, "return_token_ids": True}
    if path == COMPLETIONS:
        body["prompt"] = chat_prompt(server)
    reply = whole(server, path, **body)
    expected = sum(map(thought_tokens, reply["choices"]))
    assert 0 < expected < reply["usage"]["completion_tokens"]
    assert reasoning(reply["usage"]) == expected


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS))
def test_usage_of_a_stream_counts_reasoning_tokens(server, path):
    """Beside each chunk those of its choice so far, and at the end those of all choices."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"n": 2, "temperature": 1.0, "stream_options": options, "return_token_ids": True}
    if path == COMPLETIONS:
        body["prompt"] = chat_prompt(server)
    *chunks, last = events(server, path, **body)
    said = {0: {"token_ids": []}, 1: {"token_ids": []}}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        ids = said[choice["index"]]
        ids["token_ids"] += choice.get("token_ids") or []
        if ids["token_ids"]:
            assert reasoning(chunk["usage"]) == thought_tokens(ids)
    assert last["choices"] == []
    assert reasoning(last["usage"]) == sum(map(thought_tokens, said.values()))


def test_usage_of_responses_counts_reasoning_tokens(server):
    """Whole and streamed."""
    (choice,) = whole(server, CHAT, return_token_ids=True)["choices"]
    response = whole(server, RESPONSES)
    details = response["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == thought_tokens(choice) > 0
    streamed = events(server, RESPONSES)[-1]["response"]["usage"]["output_tokens_details"]
    assert streamed["reasoning_tokens"] == details["reasoning_tokens"]


def test_a_request_that_does_not_think_has_no_reasoning_tokens(server):
    """A plain prompt: the usage says 0, and there is no summary."""
    reply = whole(server, COMPLETIONS, prompt=[65, 66, 67], max_tokens=4)
    assert reasoning(reply["usage"]) == 0
    assert "meridian" not in reply["choices"][0]


def test_a_choice_tells_its_times(server):
    """In milliseconds; vLLM's own metrics have them, too."""
    started_s = time.monotonic()
    reply = whole(server, CHAT)
    took_ms = (time.monotonic() - started_s) * 1000
    (choice,) = reply["choices"]
    times = choice["meridian"]
    assert 0 < times["think_ms"] < times["ttfat_ms"]
    assert times["answer_ms"] > 0
    # The server and its client read clocks of their own.
    assert times["ttfat_ms"] + times["answer_ms"] <= took_ms + 5
    assert times["preemptions"] == 0
    metrics = reply["metrics"]
    assert metrics["time_to_first_answer_token_ms"] == times["ttfat_ms"]
    assert metrics["think_time_ms"] == times["think_ms"]
    assert metrics["answer_time_ms"] == times["answer_ms"]
    assert metrics["exit_reason"] == times["exit_reason"]
    assert metrics["preemptions"] == 0
    assert metrics["time_to_first_token_ms"] < times["ttfat_ms"]
    *_, last = events(server, CHAT, stream_options={"include_usage": True})
    assert last["metrics"]["time_to_first_answer_token_ms"] > last["metrics"]["think_time_ms"] > 0


def sample(server, name: str) -> float:
    """One sample of the metrics page, by name and further label."""
    (line,) = (each for each in server.get("/metrics").splitlines() if name in fields(each))
    return float(line.rpartition(" ")[2])


def fields(line: str) -> list[str]:
    """``name_label_value`` of a sample, in one string."""
    name, _, rest = line.partition("{")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    further = [value for key, value in labels.items() if key not in ("model_name", "engine")]
    return [" ".join([name, *further])]


def test_metrics_tell_phases_apart(server):
    """One request that thinks: one first answer token, a gap per token, and tokens by phase."""
    names = {
        "ttfat": "meridian_time_to_first_answer_token_seconds_count yes",
        "plain": "meridian_time_to_first_answer_token_seconds_count no",
        "think gaps": "meridian_inter_token_seconds_count think",
        "answer gaps": "meridian_inter_token_seconds_count answer",
        "ttot": "meridian_inter_token_seconds_count ttot",
        "think": "meridian_output_tokens_total think",
        "answer": "meridian_output_tokens_total answer",
        "think times": "meridian_request_phase_seconds_count think",
    }
    before = {key: sample(server, name) for key, name in names.items()}
    reply = whole(server, CHAT, return_token_ids=True)
    grown = {key: sample(server, name) - before[key] for key, name in names.items()}
    think = thought_tokens(reply["choices"][0])
    answer = reply["usage"]["completion_tokens"] - think - 1
    assert grown == {
        "ttfat": 1,
        "plain": 0,
        # From the first think token to the boundary.
        "think gaps": think,
        "ttot": 1,
        "answer gaps": answer - 1,
        "think": think + 1,
        "answer": answer,
        "think times": 1,
    }
    assert "meridian_info{" in server.get("/metrics")


def test_metrics_tell_what_the_policy_costs(server):
    """From EngineCore, after some steps of several requests at once."""
    whole(server, CHAT, n=12, temperature=1.0, max_tokens=100)
    assert sample(server, "meridian_steps_total ran") >= 64
    assert sample(server, "meridian_step_seconds_total measured") > 0
    assert sample(server, "meridian_policy_seconds_total limits") > 0


def test_the_doctor_finds_nothing_to_mend(server, monkeypatch):
    """`meridian doctor --url` sees metrics and processes, closes a thought, hits the cache."""
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(server.status_directory))
    findings = {each.check: each for each in check_server(ServerClient(server.url), read_all())}
    # A decision may be slow on a busy machine.
    findings.pop("steps")
    assert [each for each in findings.values() if each.state is not State.OK] == []
    assert findings["forced close"].found.startswith("exit_reason hard_cap after ")
    assert {"metrics", "processes", "prefix cache", "reasoning_tokens"} <= set(findings)


def test_top_names_the_phase_that_fills_the_cache(server):
    """Thoughts that outgrow the KV pool are the bottleneck while they run, and not after."""
    never_ends = {"ignore_eos": True, "logit_bias": {str(THINK_END_ID): -100}, "max_tokens": 500}
    never_ends["temperature"] = 1.0
    client = ServerClient(server.url)
    verdicts = []
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(post, server, CHAT, **never_ends) for _ in range(12)]
        before = parse(client.metrics(), time.monotonic())
        while not all(each.done() for each in asked):
            time.sleep(0.5)
            after = parse(client.metrics(), time.monotonic())
            verdicts.append(view(before, after).verdict)
            before = after
    assert {each.result()[0] for each in asked} == {200}
    assert "think" in {each.bottleneck for each in verdicts}, verdicts
    held = [each.numbers for each in verdicts if each.bottleneck == "think"]
    assert all("preempted in" in each or "% full and" in each for each in held)
    time.sleep(0.5)
    idle = [parse(client.metrics(), time.monotonic()) for _ in range(2)]
    assert view(*idle).verdict.bottleneck == "none"


def chat_prompt(server) -> list[int]:
    """Token ids of the chat turn, thinking begun."""
    reply = whole(server, CHAT, max_tokens=1, return_token_ids=True)
    return reply["prompt_token_ids"]


OFFLINE = """
import json, sys
import meridian_patch
from vllm import LLM, SamplingParams

llm = LLM(**json.loads(sys.argv[1]))
def generate(stop=None, **xargs):
    params = SamplingParams(temperature=0, max_tokens=300, stop=stop, extra_args=xargs)
    messages = [{"role": "user", "content": sys.argv[2]}]
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0]

try:
    generate(meridian_exit="on")
except ValueError as error:
    refused = str(error)
output = generate(meridian_exit="observe")
scopes = ("all", "answer")
stops = [generate(list("0123456789"), meridian_stop_scope=scope).text for scope in scopes]
print("RESULT" + json.dumps({
    "refused": refused, "stops": stops,
    "summary": output.meridian, "n_tokens": len(output.token_ids),
}))
"""


def test_offline_it_is_a_value_error_and_an_attribute(demo_model, tmp_path):
    """`LLM.generate` raises before it runs anything, and `CompletionOutput` says how it ended."""
    arguments = engine_arguments(demo_model)
    env = clean_environment(tmp_path) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = tmp_path / "log.txt"
    with log.open("wb") as sink:
        run = subprocess.run(
            [sys.executable, "-P", "-c", OFFLINE, json.dumps(arguments), QUESTION],
            env=env,
            stdout=subprocess.PIPE,
            stderr=sink,
            timeout=240,
            check=False,
        )
    assert run.returncode == 0, log_tail(log)
    seen = json.loads(run.stdout.decode().rpartition("RESULT")[2])
    assert EXPECTED in seen["refused"]
    assert seen["summary"]["exit_reason"] == "natural"
    assert 0 < seen["summary"]["think_tokens"] < seen["n_tokens"]
    everywhere, in_answer = seen["stops"]
    assert THINK_END not in everywhere
    assert in_answer.endswith(THINK_END)
