"""Broken servers: each finding names its cause and its fix. The servers here are not vLLM's."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_server import closed_reply, serving

from meridian_patch import cli, envs
from meridian_patch.engine import status
from meridian_patch.operate import http_client
from meridian_patch.operate.doctor import behaviour
from meridian_patch.operate.doctor.finding import State
from meridian_patch.operate.doctor.model import check_model, check_template
from meridian_patch.operate.doctor.server import check_processes, check_server
from meridian_patch.operate.http_client import ServerClient, ServerError

CORE = {"pid": 5, "role": "engine_core", "patches": [{"patch": "worker", "outcome": "applied"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def server():
    with serving() as started:
        yield started


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Counters of these servers do not lag behind."""
    monkeypatch.setattr(behaviour, "_COUNTED_WITHIN_S", 0.0)


def findings_of(server, reports=(CORE,)):
    """Findings by what was looked at; all that are not in order say what to do."""
    findings = list(check_server(ServerClient(server.url, limit_s=10), reports))
    for each in findings:
        assert each.state in (State.OK, State.SKIP) or (each.fix and each.expected)
    return {each.check: each for each in findings}


def test_a_healthy_server_has_nothing_to_fix(server):
    """No false alarm, and the requests are what they should be."""
    findings = findings_of(server)
    assert {each.state for each in findings.values()} == {State.OK}
    assert "hard_cap after 9 tokens" in findings["forced close"].found
    assert "96 of 100 prompt tokens hit" in findings["prefix cache"].found
    (close, first, second) = server.asked
    assert close[1]["vllm_xargs"]["meridian_exit"] == "enforce"
    assert close[1]["vllm_xargs"]["meridian_max_think_tokens"] == behaviour.CAP_TOKENS
    assert first == second
    ranks = [each.get("X-Data-Parallel-Rank") for each in server.headers]
    assert [rank for rank in ranks if rank] == ["0", "0"]


def test_an_unreachable_address(server):
    """Nothing listens there."""
    server.url = "http://127.0.0.1:1"
    finding = findings_of(server)["reachable"]
    assert finding.state is State.FAIL
    assert "127.0.0.1:1 cannot be reached" in finding.found
    assert "correct host and port" in finding.fix


def test_an_address_that_accepts_and_says_nothing(monkeypatch):
    """A port of another kind: the limit ends the wait."""
    monkeypatch.setattr(http_client, "_GET_LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ServerClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        (finding,) = check_server(client, [])
    assert finding.state is State.FAIL
    assert "gave no whole reply: timed out" in finding.found


def test_a_server_whose_engine_has_ended(server):
    server.replies["/health"] = (503, "")
    finding = findings_of(server)["reachable"]
    assert finding.state is State.FAIL
    assert "HTTP 503" in finding.found


def test_an_unpatched_server(server):
    """It has vLLM's metrics, none of ours, and is asked for nothing."""
    server.page.is_patched = False
    finding = findings_of(server)["metrics"]
    assert finding.state is State.FAIL
    assert "it runs stock" in finding.found
    assert "VLLM_PLUGINS=meridian_patch" in finding.fix
    assert server.asked == []


def behind_rust(server, **report):
    """A server whose front end is vLLM's in Rust, and what its engine reports."""
    server.page.is_patched = False
    server.replies["/version"] = (200, {"version": "0.33.0", "rust_frontend_version": "0.33.0"})
    return findings_of(server, [CORE | report])


def test_the_rust_front_end_is_named_and_its_engines_are_asked(server):
    """It has none of our metrics and runs patched all the same."""
    with serving() as engine:
        engine.page.changes["meridian_parts_off_total", "the policy"] = 1
        findings = behind_rust(server, front_end="rust", metrics=f"{engine.url}/metrics")
    assert findings["front end"].state is State.WARN
    assert "vLLM's in Rust, 0.33.0" in findings["front end"].found
    assert "without VLLM_USE_RUST_FRONTEND" in findings["front end"].fix
    assert findings["metrics"].state is State.OK
    assert "the policy 1" in findings["parts"].found
    assert not any("it runs stock" in each.found for each in findings.values())
    # What a reply says of a thought is not there to be judged.
    assert server.asked == []


def test_an_engine_behind_the_rust_front_end_that_exports_nothing(server):
    """Its reason is told; an engine that is not reached is a finding as well."""
    finding = behind_rust(server, metrics_off="127.0.0.1:18000 cannot be had")["metrics"]
    assert finding.state is State.WARN
    assert "127.0.0.1:18000 cannot be had" in finding.found
    finding = behind_rust(server, metrics="http://127.0.0.1:1/metrics")["metrics"]
    assert finding.state is State.FAIL
    assert "cannot be reached" in finding.found


def test_a_server_without_statistics(server):
    """It may be patched: its option is named, not its patches."""
    server.page.is_patched = server.page.has_stats = False
    finding = findings_of(server)["metrics"]
    assert finding.state is State.FAIL
    assert "stock" not in finding.found
    assert finding.fix == "start the server without --disable-log-stats"


@pytest.mark.parametrize(
    ("text", "found"),
    (
        ("<html>hello</html>\n", "no page of metrics"),
        ("", "empty"),
        ('vllm:prefix_cache_hits_total{engine="0"} 3', "cut off"),
    ),
)
def test_a_page_that_is_none_of_vllms(server, text, found):
    """A proxy's page, an empty one, half of one."""
    server.replies["/metrics"] = (200, text)
    finding = findings_of(server)["metrics"]
    assert finding.state is State.FAIL
    assert found in finding.found


def test_another_programs_metrics(server):
    server.replies["/metrics"] = (200, "# TYPE go_threads gauge\ngo_threads 8\n")
    finding = findings_of(server)["metrics"]
    assert "no metrics of vLLM" in finding.found
    assert "vLLM's own server" in finding.fix
    assert "--disable-log-stats" in finding.fix


def test_a_release_that_was_not_checked(server):
    server.replies["/version"] = (200, {"version": "0.31.0"})
    finding = findings_of(server)["release"]
    assert finding.state is State.FAIL
    assert "0.31.0" in finding.found


@pytest.mark.parametrize(
    ("change", "check", "state"),
    (
        (("meridian_parts_off_total", "the policy"), "parts", State.FAIL),
        (("meridian_policy_fallbacks_total", "exception"), "steps", State.FAIL),
        (("meridian_policy_fallbacks_total", "slow"), "steps", State.WARN),
        (("meridian_probes_total", "lost"), "signals", State.WARN),
    ),
)
def test_counters_that_stand_for_trouble(server, change, check, state):
    server.page.changes[change] = 7
    finding = findings_of(server)[check]
    assert finding.state is state
    assert "7" in finding.found


@pytest.mark.parametrize(
    ("reply", "state", "found"),
    (
        (closed_reply("natural"), State.WARN, "exit_reason natural"),
        (closed_reply(None), State.FAIL, "says nothing of a thought"),
        ({"choices": []}, State.FAIL, "says nothing of a thought"),
        (
            {"choices": [{"meridian": {"not_enforced": {"hard_cap": "logits_processors"}}}]},
            State.FAIL,
            "could not close the thought: logits_processors",
        ),
        (
            {"choices": [{"meridian": {"not_enforced": {"hard_cap": "no_boundary"}}}]},
            State.WARN,
            "the model's end of thinking is not known",
        ),
    ),
)
def test_a_close_that_does_not_come(server, reply, state, found):
    server.replies[CHAT] = (200, reply)
    finding = findings_of(server)["forced close"]
    assert finding.state is state
    assert found in finding.found


def test_a_request_that_is_refused(server):
    """By the operator's own setting it is no fault; otherwise the message is shown."""
    message = "requests.allowed_fields does not name meridian_exit"
    server.replies[CHAT] = (400, {"error": {"message": message}})
    assert findings_of(server)["forced close"].state is State.SKIP
    server.replies[CHAT] = (500, {"error": {"message": "engine dead"}})
    assert "engine dead" in findings_of(server)["forced close"].found


def test_reasoning_tokens(server):
    """0 beside a thought of 9 tokens is a finding; without a parser nothing is counted."""
    server.replies[CHAT] = (200, closed_reply(reasoning_tokens=0))
    finding = findings_of(server)["reasoning_tokens"]
    assert finding.state is State.WARN
    assert finding.found == "usage says 0, the thought had 9 tokens"
    server.replies[CHAT] = (200, closed_reply(reasoning_tokens=None))
    assert findings_of(server)["reasoning_tokens"].state is State.SKIP


@pytest.mark.parametrize(
    ("hits", "tokens", "state"),
    ((0, 100, State.FAIL), (96, 100, State.OK), (0, 16, State.SKIP)),
)
def test_prefix_hits(hits, tokens, state):
    assert behaviour.judge_hits(hits, tokens, 16).state is state


def test_a_prefix_cache_that_is_off(server):
    text = server.page.text().replace(
        'enable_prefix_caching="True"', 'enable_prefix_caching="False"'
    )
    server.replies["/metrics"] = (200, text)
    finding = findings_of(server)["prefix cache"]
    assert finding.state is State.WARN
    assert "--enable-prefix-caching" in finding.fix


def test_processes():
    """Seen, of another user, with a refused patch, on another machine."""
    assert check_processes(True, [CORE]).state is State.OK
    assert check_processes(True, []).state is State.WARN
    assert check_processes(False, []).state is State.SKIP
    refused = CORE | {"patches": [{"patch": "worker", "outcome": "contract_broken"}]}
    finding = check_processes(True, [refused])
    assert finding.state is State.FAIL
    assert "process 5 (worker)" in finding.found


def run(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--quick", *arguments])
    return ended.value.code, capsys.readouterr()


@pytest.fixture
def no_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(tmp_path / "status"))
    monkeypatch.setattr(status, "_report", {})


def test_the_command_fails_with_a_broken_server(no_processes, server, capsys):
    """Exit code 1, each finding whole in JSON, and in 80 columns for people."""
    server.page.is_patched = False
    code, printed = run(["--json", "--url", server.url], capsys)
    assert code == 1
    told = json.loads(printed.out)
    assert told["state"] == "fail"
    (metrics,) = [each for each in told["findings"] if each["check"] == "metrics"]
    assert set(metrics) == {"area", "check", "state", "found", "expected", "fix"}
    code, printed = run(["--url", server.url], capsys)
    assert code == 1
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "it runs stock" in printed.out
    assert "fix: start it with VLLM_PLUGINS=meridian_patch" in " ".join(printed.out.split())
    # The server comes first; of this machine only what is not in order, on one screen.
    lines = printed.out.splitlines()
    assert lines[0] == "server"
    here = lines[lines.index("environment  only what is not in order") :]
    assert not any(line.startswith("  ok ") for line in here)
    assert len(lines) <= 50


@pytest.mark.parametrize("url", ("localhost:http", "http://", "http://[", "ftp://host", "nonsense"))
def test_a_wrong_address_is_a_finding(no_processes, url, capsys):
    """No traceback, whatever is written there."""
    code, printed = run(["--url", url], capsys)
    assert code == 1
    assert "is no http://host:port" in " ".join(printed.out.split())
    assert "Traceback" not in printed.err


def test_a_check_that_fails_itself_is_a_finding(no_processes, monkeypatch, capsys):
    """The others still run."""

    def broken(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr("meridian_patch.operate.doctor.run.check_environment", broken)
    code, printed = run([], capsys)
    assert code == 1
    assert "RuntimeError: no such luck" in printed.out
    assert "configuration" in printed.out


def test_a_missing_working_directory_is_a_finding(no_processes, monkeypatch, capsys):
    """Whatever cannot be read of the environment, the rest is looked at."""

    def gone():
        raise FileNotFoundError("the working directory is gone")

    monkeypatch.setattr("meridian_patch.operate.doctor.run.read_installed", gone)
    code, printed = run([], capsys)
    assert code == 1
    assert "the working directory is gone" in printed.out
    assert "names of variables" in printed.out


def test_a_broken_status_file_is_a_finding(no_processes, server, tmp_path, capsys):
    """The server is asked all the same."""
    folder = tmp_path / "status"
    folder.mkdir(mode=0o700)
    (folder / "7.json").write_text("{")
    code, printed = run(["--url", server.url, "--json"], capsys)
    assert code == 1
    found = {each["check"]: each["found"] for each in json.loads(printed.out)["findings"]}
    assert "7.json cannot be read" in found["status files"]
    assert found["forced close"].startswith("exit_reason hard_cap")


def test_a_wrong_switch_does_not_stop_the_command(server):
    """`MERIDIAN_PATCH=yes` stops vLLM's processes, and the command that says why starts."""
    env = envs.environment() | {"MERIDIAN_PATCH": "yes", "MERIDIAN_PATCH_MODUS": "x"}
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "doctor", "--quick", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    failed = {each["check"] for each in json.loads(done.stdout)["findings"] if each["fix"]}
    assert {"activation", "names of variables"} <= failed


@pytest.mark.parametrize("limit", ("0", "-1", "inf", "nan", "x"))
def test_a_wrong_limit_is_refused(limit, capsys):
    code, printed = run([f"--limit-s={limit}"], capsys)
    assert code == 2
    assert "--limit-s" in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("text", ("first\nsecond\n", "", "k\u00e9y", "one\ttwo", b"\xff\n"))
def test_a_key_file_that_holds_no_key(text, tmp_path, capsys):
    """One sentence, and nothing of the file in it."""
    file = tmp_path / "file"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, printed = run(["--api-key-file", str(file)], capsys)
    assert code == 1
    assert printed.err == (
        f"meridian: --api-key-file {file} must hold one key: "
        "one line of printable ASCII characters\n"
    )


def test_a_redirect_is_not_followed(server):
    """Another host is not sent the key."""
    with serving() as other:
        server.sent["Location"] = f"{other.url}/health"
        server.replies |= {"/health": (302, ""), CHAT: (303, "")}
        client = ServerClient(server.url, "secret")
        assert client.get("/health").begin == "HTTP 302"
        assert client.post(CHAT, {}).begin == "HTTP 303"
        assert [each["Authorization"] for each in server.headers] == ["Bearer secret"] * 2
        assert other.num_asked == 0


def test_a_reply_that_is_cut_off(server):
    """A body shorter than its length is not taken for the whole."""
    server.missing_bytes = 5
    with pytest.raises(ServerError, match=r"no whole reply: IncompleteRead.*5 more expected"):
        ServerClient(server.url).get("/version")


def test_this_machine_is_asked_through_no_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert ServerClient(server.url).get("/health").is_ok


@pytest.mark.parametrize(
    ("address", "url"),
    (
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("gpu-1.example:8000/metrics", "http://gpu-1.example:8000"),
        ("[::1]:8000/v", "http://[::1]:8000/v"),
        ("https://gpu-1.example", "https://gpu-1.example"),
    ),
)
def test_an_address_needs_no_scheme(address, url):
    """HOST:PORT is HTTP."""
    assert ServerClient(address).url == url


@pytest.mark.parametrize("url", ("http://bob:hunter2@host", "http://hunter2@host", "bob:hunter2@h"))
def test_an_address_with_a_password_is_not_quoted(no_processes, url, capsys):
    code, printed = run(["--url", url], capsys)
    assert code == 1
    assert "no user and no password" in " ".join(printed.out.split())
    assert "hunter2" not in printed.out + printed.err


def test_a_template_error_without_a_text():
    """Its name is told."""

    def broken(*_, **__):
        raise ValueError

    finding = check_template(SimpleNamespace(apply_chat_template=broken), None, "think")
    assert finding.found == "no prompt can be made of a chat: ValueError"


def test_tiktoken_is_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "m"}')
    (tmp_path / "tiktoken.model").touch()
    first = next(iter(check_model(str(tmp_path), None)))
    assert (first.check, first.state) == ("files", State.OK)


def test_a_key_file_that_cannot_be_read(capsys):
    code, printed = run(["--api-key-file", "/nowhere"], capsys)
    assert code == 1
    assert printed.err.startswith("meridian: --api-key-file /nowhere cannot be read")
