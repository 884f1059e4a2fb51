"""Both sides of a hand-off as a client sees them. The servers here are not vLLM's."""

import json
import shutil
import ssl
import subprocess

import pytest
from fake_server import closed_reply, serving
from missing import skip_but_in_ci

from meridian_patch import cli
from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.operate.doctor import behaviour
from meridian_patch.operate.doctor.finding import State
from meridian_patch.operate.doctor.handoff import check_handoff
from meridian_patch.operate.http_client import ServerClient

CHAT, TOKENS = "/v1/chat/completions", "/inference/v1/generate"
HANDOFFS, STAYS = "meridian_handoffs_total", "meridian_handoff_stays_total"
NIXL = 'vllm:nixl_num_failed_transfers_total{engine="0"} 0'
TAKEN = 'vllm:external_prefix_cache_hits_total{engine="0"} 144'
THINK = {"pid": 7, "role": "engine_core", "handoff": "think"}
ANSWER = {"pid": 8, "role": "engine_core", "handoff": "answer"}
CHECKS = ["reachable", "model", "version", "block_size", "cache_dtype", "max_model_len"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Counters of these servers do not lag behind."""
    monkeypatch.setattr(behaviour, "_COUNTED_WITHIN_S", 0.0)


@pytest.fixture
def think():
    with serving() as server:
        server.page.lines = [NIXL]
        reply = closed_reply()
        reply["usage"]["prompt_tokens"] = 300
        server.replies[CHAT] = (200, reply)
        yield server


@pytest.fixture
def answer():
    with serving() as server:
        server.page.lines = [NIXL]
        server.replies[TOKENS] = (200, {"choices": [{"token_ids": [5]}]})
        yield server


def counts(server, name, value):
    """The server counts one with each chat."""

    def count(path):
        if path == CHAT:
            server.page.changes[name, value] = server.page.changes.get((name, value), 0.0) + 1

    server.on_asked = count


def moves(think, answer):
    counts(think, HANDOFFS, "moved")
    count = think.on_asked

    def moved(path):
        count(path)
        answer.page.lines.append(TAKEN)

    think.on_asked = moved


def findings_of(think, *urls, reports=(), **config):
    """Findings in order; all that are not in order say what to do."""
    client = ServerClient(think.url, limit_s=10)
    found = list(check_handoff(client, urls, HandoffConfig(**config), reports))
    for each in found:
        assert each.state in (State.OK, State.SKIP) or (each.fix and each.expected)
    return found


def by_check(*arguments, **others):
    return {each.check: each for each in findings_of(*arguments, **others)}


def test_both_sides_are_in_order(think, answer):
    """One line each, and one request that is long enough, ends its thought and answers."""
    moves(think, answer)
    found = findings_of(think, answer.url)
    assert {each.state for each in found} == {State.OK}
    assert [each.check for each in found] == [
        *CHECKS,
        *("token endpoint", "connector", "one request", "KV cache", "role"),
    ]
    assert found[0].area == f"answer engine {answer.url}"
    assert found[-3].found == f"{HANDOFFS} counted moved 1"
    assert found[-2].found == f"{answer.url} took 144 tokens of it"
    ((_, body),) = think.asked
    assert len(body["messages"][0]["content"].split()) > 8 * 16
    assert body["vllm_xargs"]["meridian_exit"] == "enforce"
    assert body["ignore_eos"]
    assert [path for path, _ in answer.asked] == [TOKENS]


def broken_version(answer):
    answer.replies["/version"] = (404, "<html>")


def other_version(answer):
    answer.replies["/version"] = (200, {"version": "0.33.0"})


def other_model(answer):
    answer.replies["/v1/models"] = (200, {"data": [{"id": "m", "root": "large"}]})


def shorter(answer):
    card = {"id": "m", "root": "tiny", "max_model_len": 512}
    answer.replies["/v1/models"] = (200, {"data": [card]})


def other_block_size(answer):
    answer.page.block_size = 32


def other_type(answer):
    text = answer.page.text().replace('cache_dtype="auto"', 'cache_dtype="fp8"')
    answer.replies["/metrics"] = (200, text)


def no_endpoint(answer):
    del answer.replies[TOKENS]


def no_connector(answer):
    answer.page.lines = []


def wrong_key(answer):
    answer.replies["/v1/models"] = (401, {"error": "Unauthorized"})


@pytest.mark.parametrize(
    ("breaks", "check", "found", "fix"),
    (
        (broken_version, "/version", "HTTP 404 '<html>'", "address of vLLM's own server"),
        (other_version, "version", "'0.33.0'", "same model, vLLM release"),
        (other_model, "model", "'large'", "same model, vLLM release"),
        (shorter, "max_model_len", "512", "same model, vLLM release"),
        (other_block_size, "block_size", "'32'", "same model, vLLM release"),
        (other_type, "cache_dtype", "'fp8'", "same model, vLLM release"),
        (no_endpoint, "token endpoint", "not there", "--enable-scale-out"),
        (no_connector, "connector", "not NIXL", "the same --fabric"),
        (wrong_key, "reply to the key", "HTTP 401", "set handoff.api_key_file"),
    ),
)
def test_an_answer_engine_that_differs(breaks, check, found, fix, think, answer):
    """It is named, and the think server counts that it went on itself."""
    breaks(answer)
    counts(think, HANDOFFS, "answered_at_home")
    findings = by_check(think, answer.url)
    failed = [name for name, each in findings.items() if each.state is State.FAIL]
    assert failed[0] == check
    assert found in findings[check].found
    assert fix in findings[check].fix
    assert findings["one request"].state is State.FAIL
    assert "counted answered_at_home 1" in findings["one request"].found


def test_an_engine_that_is_not_there_and_an_address_that_is_none(think):
    findings = by_check(think, "http://127.0.0.1:1", "http://127.0.0.1:1/", "ftp://host")
    assert "127.0.0.1:1 cannot be reached" in findings["reachable"].found
    assert findings["address"].state is State.FAIL
    assert findings["one request"].state is State.WARN


def test_a_key_goes_to_the_answer_engine_alone(think, answer, tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    findings = by_check(think, answer.url, api_key_file=file)
    assert findings["key"].state is State.OK
    assert all(each["Authorization"] == "Bearer secret" for each in answer.headers[:4])
    assert not any("Authorization" in each for each in think.headers)
    file.write_text("\n")
    finding = by_check(think, answer.url, api_key_file=file)["key and certificates"]
    assert "must hold one key" in finding.found


def test_certificates(think, tmp_path):
    """Verified by the file of the configuration, and not by the system's."""
    if shutil.which("openssl") is None:
        skip_but_in_ci("openssl makes the certificate")
    pem = tmp_path / "pem"
    options = (
        "-x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=a -addext subjectAltName=IP:127.0.0.1"
    )
    command = ["openssl", "req", *options.split(), "-keyout", pem, "-out", tmp_path / "ca"]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "ca", pem)
    with serving(tls) as answer:
        answer.replies[TOKENS] = (200, {"choices": [{"token_ids": [5]}]})
        finding = by_check(think, answer.url)["TLS"]
        assert finding.state is State.FAIL
        assert "CERTIFICATE_VERIFY_FAILED" in finding.found
        assert "handoff.ca_file" in finding.fix
        finding = by_check(think, answer.url, ca_file=tmp_path / "ca")["TLS"]
        assert (finding.state, finding.found) == (State.OK, f"verified by {tmp_path / 'ca'}")


def test_a_request_that_stays_says_why(think, answer):
    """As far as it can be seen: these are warnings."""
    counts(think, STAYS, "penalties")
    finding = by_check(think, answer.url)["one request"]
    assert finding.state is State.WARN
    assert f"{STAYS} counted penalties 1, unless other requests did" in finding.found
    think.on_asked = str
    finding = by_check(think, answer.url)["one request"]
    assert "309 tokens, enough for handoff.offload_threshold_blocks of 8 here" in finding.found
    assert "know no answer engine" in finding.found
    finding = by_check(think, answer.url, offload_threshold_blocks=40)["one request"]
    assert "309 tokens, too few" in finding.found
    think.replies[CHAT] = (200, closed_reply(None))
    finding = by_check(think, answer.url)["one request"]
    assert "no thought that ended" in finding.found
    think.replies[CHAT] = (400, {"error": "requests.allowed_fields"})
    assert by_check(think, answer.url)["one request"].state is State.SKIP


def test_the_kv_cache_is_looked_for_where_it_should_go(think, answer):
    counts(think, HANDOFFS, "moved")
    finding = by_check(think, answer.url)["KV cache"]
    assert finding.state is State.WARN
    assert "none of these answer engines took it" in finding.found
    moves(think, answer)
    count = think.on_asked
    failed = [TAKEN, NIXL.replace(" 0", " 2")]
    think.on_asked = lambda path: (count(path), setattr(answer.page, "lines", failed))
    assert "failed to read it 2 times" in by_check(think, answer.url)["KV cache"].found


@pytest.mark.parametrize(
    ("reports", "state", "found"),
    (
        ([THINK], State.OK, "think (process 7)"),
        ([ANSWER], State.FAIL, "answer (process 8)"),
        ([THINK, ANSWER], State.SKIP, "one of these is the server's"),
        ([], State.SKIP, "no process of the server is seen"),
    ),
)
def test_the_role_where_no_request_shows_it(reports, state, found, think, answer):
    finding = by_check(think, answer.url, reports=reports)["role"]
    assert finding.state is state
    assert found in finding.found


def test_a_think_server_that_shows_nothing(think, answer):
    think.replies["/v1/models"] = (401, "")
    finding = by_check(think, answer.url)["think server"]
    assert finding.state is State.FAIL
    assert "does not show its model" in finding.found
    think.url = "http://127.0.0.1:1"
    assert by_check(think, answer.url)["think server"].state is State.SKIP


def test_a_think_server_that_runs_stock_is_asked_for_nothing(think, answer):
    think.page.is_patched = False
    finding = by_check(think, answer.url)["one request"]
    assert finding.state is State.FAIL
    assert f"no {HANDOFFS}" in finding.found
    assert think.asked == []


def run(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--quick", *arguments])
    return ended.value.code, capsys.readouterr()


def test_the_command_takes_addresses_or_the_configurations(
    think, answer, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(tmp_path / "status"))
    moves(think, answer)
    _, printed = run(["--json", "--url", think.url, "--answer", answer.url], capsys)
    told = [each for each in json.loads(printed.out)["findings"] if each["area"] == "hand-off"]
    assert [each["check"] for each in told] == ["one request", "KV cache", "role"]
    assert {each["state"] for each in told} == {"ok"}
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ROLE", "think")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_HANDOFF__ANSWER_URLS", f'["{answer.url}"]')
    _, printed = run(["--url", think.url], capsys)
    assert f"answer engine {answer.url}" in printed.out
    code, printed = run(["--answer", answer.url], capsys)
    assert (code, printed.out) == (1, "")
    assert "--answer needs --url" in printed.err
