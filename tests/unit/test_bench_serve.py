"""What `meridian bench serve` refuses, and how its client processes share a trace."""

import argparse
import io
import json
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import ClassVar, get_args

import pytest
from rich.console import Console

from meridian_patch import cli
from meridian_patch.bench.served import load, plan
from meridian_patch.bench.served.arms import ServedArm, arm_environment, read_arms
from meridian_patch.bench.served.capacity import completed_per_s
from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.command import add_serve
from meridian_patch.bench.served.load import deal, play_in_processes
from meridian_patch.bench.served.plan import (
    SIZES,
    any_settings,
    find_model,
    packaged_model,
    plan_comparison,
)
from meridian_patch.bench.served.run import rotated
from meridian_patch.bench.served.summary import (
    ArmRun,
    SeedRun,
    compared_arms,
    harm_over_stock,
    ratio_to_stock,
    summarise,
)
from meridian_patch.bench.served.workload import (
    Mix,
    ServedRequest,
    Turns,
    conversations,
    make_conversations,
    make_trace,
    read_trace,
    write_trace,
)
from meridian_patch.config.load import load_config
from meridian_patch.config.policy import PolicyConfig
from meridian_patch.errors import BenchError


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    """Which one there is vLLM says, and it is not needed here."""
    monkeypatch.setattr(plan, "accelerator_name", lambda: None)


def refused(capsys, *arguments: str) -> str:
    """The sentence that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", *arguments])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("meridian: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "stock,turbo"], "--arms: unknown arm 'turbo'; known: stock, noop, patched"),
        (["--arms", "stock,stock"], "arm 'stock' is named twice"),
        (["--arms", ""], "--arms is empty"),
        (["--arm", "fast"], "--arm is 'fast', expected NAME:KEY=VALUE"),
        (["--arm", "../x:policy.name=noop"], "expected NAME:KEY=VALUE"),
        (["--arm", "stock:policy.name=noop"], "stock has no settings of ours"),
        (["--arm", "fast:policy.name"], "--arm is 'fast:policy.name', expected NAME:KEY=VALUE"),
        (["--arm", "fast:policy.nam=noop"], "arm 'fast': "),
        (["--arm", "fast:policy.level_tokens=0"], "policy.level_tokens"),
        (["--pairs", "0"], "--pairs is '0', expected a whole number above 0"),
        (["--pairs", "2", "--seeds", "11-15"], "--pairs is 2 and --seeds is '11-15', which are 5"),
        (["--seeds", "x"], "--seeds is 'x'"),
        (["--clients", "-1"], "--clients is '-1'"),
        (["--rate", "inf"], "--rate is 'inf'"),
        (["--request-limit", "0"], "--request-limit is '0'"),
        (["--port", "65535"], "--port is '65535', expected 0 to 65534"),
        (["--serve-args", "--x 'a"], '--serve-args is "--x \'a": No closing quotation'),
        (["--blocks", "64"], "--blocks is 64, expected at least 65"),
        (["--model", "/no/where"], "model directory /no/where does not exist"),
        (["--model", "./none"], "model directory ./none does not exist"),
        (["--trace", "/no/trace.jsonl"], "cannot read the trace /no/trace.jsonl"),
        (["--trace", "t.jsonl", "--seeds", "1"], "leave one of them out"),
        (["--workload", "turns", "--blocks", "128"], "--blocks is 128, expected at least 129"),
        (["--workload", "turns", "--pause", "0"], "--pause is '0'"),
        (["--workload", "turns", "--pause-tokens", "nan"], "--pause-tokens is 'nan'"),
        (["--pause", "9", "--pause-tokens", "5"], "give one of them"),
        (["--trace", "t.jsonl", "--pause-tokens", "5"], "leave out one"),
    ],
)
def test_wrong_option_is_one_sentence(capsys, arguments, message):
    """A wrong value is refused before a server starts, in one line that names the option."""
    assert message in refused(capsys, *arguments)


def test_taken_port_is_refused(capsys, tmp_path):
    """Each arm's port is looked at before any server starts, the second one too."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        out = tmp_path / "out"
        err = refused(capsys, "--port", str(port - 1), "--out", str(out))
    assert f"port {port} on 127.0.0.1 cannot be used" in err or f"port {port - 1} on" in err
    assert not out.exists()


def test_every_policy_profile_is_an_arm():
    """Whatever policies there are can be served without a change here."""
    profiles = get_args(PolicyConfig.model_fields["name"].annotation)
    for arm in read_arms(",".join(profiles), [], {}):
        config = load_config(arm_environment(arm.environment, {})).config
        assert config.policy.name == arm.name


def test_described_arm_sets_its_keys():
    """Keys of a described arm reach the configuration of its server and of no other."""
    stock, calm = read_arms("stock", ["calm:policy.level_tokens=7,kv.tiers=false"], {})
    config = load_config(arm_environment(calm.environment, {})).config
    assert (config.policy.level_tokens, config.kv.tiers) == (7, False)
    assert arm_environment(stock.environment, {})["MERIDIAN_PATCH"] == "0"


def test_an_ample_arm_of_another_model_needs_the_pool_of_the_others(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    arguments = ["--arms", "stock,ample", "--model", str(tmp_path)]
    assert "ample has 20 times the KV pool" in refused(capsys, *arguments)


def test_hub_name_and_directory_are_told_apart(tmp_path, monkeypatch):
    """owner/name is a directory only where the owner is a folder here; nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BenchError, match="run 'hf download owner/name'"):
        find_model("owner/name")
    (tmp_path / "owner").mkdir()
    with pytest.raises(BenchError, match="owner/name does not exist"):
        find_model("owner/name")


def test_other_models_are_served_as_vllm_would(tmp_path):
    """The tiny reasoner has settings of its own; another model only what was asked for."""
    tiny = any_settings(packaged_model(), None, ("--seed", "3"))
    assert "--num-gpu-blocks-override 96" in " ".join(tiny.options)
    assert tiny.options[-2:] == ["--seed", "3"]
    other = any_settings(tmp_path / "Model-8B", 500, ("--enforce-eager",))
    assert other.options == ["--num-gpu-blocks-override", "500", "--enforce-eager"]
    assert other.served_name == "Model-8B"
    cached = tmp_path / "models--acme--Model-8B" / "snapshots" / "0a1b"
    assert any_settings(cached, None, ()).served_name == "acme/Model-8B"


def comparison_of(*options: str):
    """What ``meridian bench serve`` would compare with these options."""
    serve = add_serve(argparse.ArgumentParser().add_subparsers())
    return plan_comparison(serve.parse_args(options), "serve", Console(file=io.StringIO()))


def test_turns_are_a_workload():
    """Conversations on larger servers; the arm ample has a pool that others have not."""
    arms = "ample,stock,patched"
    found = comparison_of(
        "--workload", "turns", "--arms", arms, "--seeds", "1-3", "--requests", "9"
    )
    assert {len(trace) for trace in found.traces.values()} == {9}
    assert all(len(conversations(trace)) < 9 for trace in found.traces.values())
    sizes = [
        (s.kv_blocks, s.max_model_len) for s in (a.settings(found.settings) for a in found.arms)
    ]
    blocks, context = SIZES["turns"]
    assert sizes == [(20 * blocks, context), (blocks, context), (blocks, context)]
    assert "conversations per second" in found.workload


def test_a_file_configures_an_arm(tmp_path):
    """The arm's own keys go before those of its file."""
    file = tmp_path / "early.yaml"
    file.write_text("version: 1\nexit: {mode: enforce, grace_tokens: 9}\n")
    [early] = read_arms("", [f"early:config={file},exit.grace_tokens=3"], {})
    config = load_config(arm_environment(early.environment, {})).config
    assert (config.exit.mode, config.exit.grace_tokens) == ("enforce", 3)
    with pytest.raises(BenchError, match=r"arm 'early': .*nowhere"):
        read_arms("", ["early:config=/nowhere"], {})


def test_problems_and_conversations_are_mixed():
    """Half of each, at half the rate each; ids differ, and conversations fit into the context."""
    found = comparison_of("--workload", "mixed", "--requests", "40", "--rate", "4", "--seeds", "5")
    [trace] = found.traces.values()
    lengths = [len(turns) for turns in conversations(trace)]
    assert (sum(lengths), lengths.count(1) >= 20, max(lengths)) == (40, True, 3)
    assert len({request.id for request in trace}) == 40
    assert "2 per second" in found.workload
    assert "0.8 conversations per second" in found.workload
    assert (found.settings.kv_blocks, found.settings.max_model_len) == SIZES["mixed"]


def test_kept_thoughts_need_the_other_template():
    """Patched servers of the tiny reasoner are told of it; an arm may say otherwise."""
    wrong = "wrong-rule:kv.history=strip"
    found = comparison_of("--history", "kept", "--arms", "stock,patched", "--arm", wrong)
    assert "chat_template_keep_thinking.jinja" in " ".join(found.settings.options)
    rules = [
        load_config(arm_environment(arm.environment, {})).config.kv.history for arm in found.arms
    ]
    assert rules == ["keep", "keep", "strip"]
    assert found.load.history == "kept"
    assert comparison_of("--history", "plain").load.end_marker == ""


def test_another_arm_is_first_each_time():
    """The first to start is the fastest as a rule, whatever it runs, and each has each place."""
    orders = [rotated(range(3), pair) for pair in range(4)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert [rotated("sl", pair) for pair in range(3)] == [["s", "l"], ["l", "s"], ["s", "l"]]


def test_the_last_tenth_does_not_count():
    """Long requests that run alone at the end are no sign of a slow server."""
    ends = [float(second) for second in range(1, 10)]
    assert completed_per_s([*ends, 100.0]) == pytest.approx(1.0)
    assert completed_per_s([100.0, *reversed(ends)]) == pytest.approx(1.0)
    assert completed_per_s([0.5]) == 2.0


def test_trace_is_dealt_in_turn():
    """Each process gets its share, and none is started for nothing."""
    trace = make_trace(Mix(5, 10.0), 1)
    assert [[r.id for r in share] for share in deal(trace, 2)] == [
        ["1-0", "1-2", "1-4"],
        ["1-1", "1-3"],
    ]
    assert len(deal(trace, 9)) == 5
    turns = make_conversations(Turns(20, 1.0), 1)
    for share in deal(turns, 2):
        # No conversation is torn apart.
        assert {request.follows for request in share} <= {request.id for request in share} | {""}


def test_extra_fields_of_a_trace(tmp_path):
    """Further fields of the chat request stand in the trace; what the client decides must not."""
    path = tmp_path / "trace.jsonl"
    message = ({"role": "user", "content": "q?"},)
    trace = [ServedRequest("a", 0.0, message, "", 9, {"thinking_token_budget": 4})]
    write_trace(path, trace)
    assert read_trace(path) == trace
    write_trace(path, [ServedRequest("a", 0.0, message, "", 9, {"stream": False})])
    with pytest.raises(BenchError, match="line 1: field extra is"):
        read_trace(path)


class Streams(BaseHTTPRequestHandler):
    """Streams three tokens; the question says what goes wrong."""

    seen: ClassVar[list[dict]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        question = body["messages"][-1]["content"]
        self.send_response(400 if question == "bad" else 200)
        self.end_headers()
        for number in range(3):
            if question == "hangs" and number == 2:
                time.sleep(3)
            ends = number == 2 and question != "breaks off"
            choice = {
                "token_ids": [number],
                "delta": {"reasoning": "hm"} if number == 0 else {"content": "x"},
                "finish_reason": "stop" if ends else None,
            }
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    """A stand-in for a server; it streams what a vLLM server would."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    Streams.seen.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def requests(*questions: str, gap_s: float = 0.02) -> list[ServedRequest]:
    return [
        ServedRequest(
            str(n), n * gap_s, ({"role": "user", "content": question},), "", 9, {"top_k": n}
        )
        for n, question in enumerate(questions)
    ]


def test_processes_share_a_trace(address):
    """All requests of both processes are merged, each sent when due on one shared clock."""
    records, ended = [], []
    trace = requests(*["fine"] * 9)
    play_in_processes(
        Client(address, "m"), trace, 2, records, lambda: None, lambda: ended.append(1)
    )
    assert sorted(record.request.id for record in records) == [str(n) for n in range(9)]
    assert len(ended) == 9
    for record in records:
        assert record.finish_reason == "stop"
        assert record.token_ids == [0, 1, 2]
        late_s = record.submit_s - record.request.arrival_s
        assert 0 <= late_s < 0.5
        assert record.submit_s <= record.token_s[0] <= record.token_s[-1]
    assert sorted(body["top_k"] for body in Streams.seen) == list(range(9))


def turns_of(*questions: str) -> list[ServedRequest]:
    """One conversation, without pauses."""
    trace: list[ServedRequest] = []
    for request in requests(*questions, gap_s=0.0):
        follows = trace[-1].id if trace else ""
        trace.append(replace(request, follows=follows))
    return trace


@pytest.mark.parametrize("history", ["stripped", "kept", "plain"])
def test_turns_hold_what_the_server_said(address, history):
    """A later turn waits for the answer before it and holds it; the thought only where kept."""
    records = []
    Client(address, "m", history=history).play(turns_of("a?", "b?", "c?"), records)
    assert [record.request.id for record in records] == ["0", "1", "2"]
    assert all(b.submit_s >= a.token_s[-1] for a, b in pairwise(records))
    said = {"role": "assistant", "content": "xx"}
    if history == "kept":
        said["reasoning"] = "hm"
    user = [{"role": "user", "content": question} for question in ("a?", "b?", "c?")]
    assert Streams.seen[2]["messages"] == [user[0], said, user[1], said, user[2]]
    plain = {"enable_thinking": False}
    assert [body.get("chat_template_kwargs") for body in Streams.seen] == (
        [plain] * 3 if history == "plain" else [None] * 3
    )


def test_a_conversation_ends_where_it_fails_or_would_not_fit(address):
    """Later turns are not sent and are no failures; other conversations go on."""
    records = []
    trace = [*turns_of("a?", "breaks off", "c?"), replace(requests("d?")[0], id="d")]
    play_in_processes(Client(address, "m"), trace, 2, records, lambda: None, lambda: None)
    assert sorted(record.request.id for record in records) == ["0", "1", "d"]
    records.clear()
    # The first prompt has 2 bytes, the second 6 and the markers of 3 messages.
    Client(address, "m", context_tokens=2 + 2 + 2 + 4 * 6 + 9).play(turns_of(*["a?"] * 3), records)
    assert [record.request.id for record in records] == ["0", "1"]


def test_a_client_process_that_fails_is_an_error(address, monkeypatch, tmp_path):
    """The requests that it did not send would be missing from the figures."""
    (tmp_path / "broken_client.py").write_text("print('ready', flush=True); input(); exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(load, "PROCESS_MODULE", "broken_client")
    with pytest.raises(BenchError, match=r"exit codes \[3\], expected 0"):
        play_in_processes(Client(address, "m"), requests("a"), 2, [], lambda: None, lambda: None)


def test_failed_requests_are_noted_and_block_no_other(address):
    """A refused, a broken and a hanging request end as failed; the others are as ever."""
    records = []
    trace = requests("fine", "bad", "breaks off", "hangs")
    begin = time.monotonic()
    play_in_processes(
        Client(address, "m", request_limit_s=1.0), trace, 2, records, lambda: None, lambda: None
    )
    assert time.monotonic() - begin < 10
    by_id = {record.request.id: record for record in records}
    assert by_id["0"].finish_reason == "stop"
    assert by_id["1"].error.startswith("HTTP 400")
    assert (by_id["2"].error, by_id["2"].finish_reason) == (None, None)
    assert "Timeout" in by_id["3"].error


def test_broken_off_run_keeps_what_was_under_way(address):
    """When the server is found dead, ended requests and those under way are kept."""
    records = []
    looks = iter([None, None, BenchError("the vLLM server ended")])

    def check_server() -> None:
        error = next(looks)
        if error is not None:
            raise error

    with pytest.raises(BenchError, match="the vLLM server ended"):
        play_in_processes(
            Client(address, "m"),
            requests("fine", "hangs"),
            2,
            records,
            check_server,
            lambda: None,
        )
    by_id = {record.request.id: record for record in records}
    assert by_id["0"].finish_reason == "stop"
    assert by_id["1"].finish_reason is None
    assert by_id["1"].token_ids == [0, 1]


def test_ratio_needs_both_arms_and_pairs_by_seed():
    """Without stock there is nothing to compare with; noop is compared only when alone."""
    arms = [summarise(ArmRun(name)) for name in ("stock", "noop", "latency", "calm")]
    assert compared_arms(arms) == ["latency", "calm"]
    assert compared_arms(arms[:2]) == ["noop"]
    assert compared_arms(arms[1:]) == []
    assert ratio_to_stock(arms, "latency", "tokens_per_s") is None


def whole_run(name: str, ttfat_s: float, *, is_complete: bool = True) -> ArmRun:
    """One request that thinks for one token and answers with two."""
    request = ServedRequest("a", 0.0, (), "", 9)
    record = RequestRecord(
        request, 0.0, [9, 1, 2], [0.1, ttfat_s, ttfat_s + 0.1], finish_reason="stop"
    )
    return ArmRun(name, [SeedRun(11, (9,), [record], {}, is_complete)])


def test_harm_is_what_the_same_request_lost():
    """A request that got its answer half as late again counts as 0.5."""
    arms = [summarise(whole_run("stock", 1.0)), summarise(whole_run("latency", 1.5))]
    assert harm_over_stock(arms, "latency").by_seed == {11: pytest.approx(0.5)}
    assert ratio_to_stock(arms, "latency", "ttfat_p95_s").value == pytest.approx(1.5)


def test_broken_run_is_compared_with_no_other():
    """Half a run against a whole one would be no ratio."""
    broken = summarise(whole_run("latency", 1.5, is_complete=False))
    arms = [summarise(whole_run("stock", 1.0)), broken]
    assert ratio_to_stock(arms, "latency", "ttfat_p95_s") is None
    assert harm_over_stock(arms, "latency") is None
    assert broken.spreads["ttfat_p95_s"].median == pytest.approx(1.5)


def test_arms_with_equal_names_cannot_hide():
    """An arm described under the name of a listed one is refused."""
    with pytest.raises(BenchError, match="arm 'noop' is named twice"):
        read_arms("noop", ["noop:kv.tiers=false"], {})
    assert read_arms("", ["own:kv.tiers=false"], {}) == [
        ServedArm("own", {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_SET_KV__TIERS": "false"})
    ]
