"""The marathon's plan, its verdict, and what it strikes with; no engine is started."""

import asyncio
import json
import sys
import time
from dataclasses import replace
from http import HTTPStatus
from itertools import pairwise

import aiohttp
import pytest
from marathon import fleet
from marathon.command import parse, read_settings
from marathon.faults import REST_S, SHAPES, STRUCK, Fault, plan_faults
from marathon.load import Canary, Load, know
from marathon.logs import read_logs
from marathon.network import Collector, Proxy
from marathon.processes import Supervised, processes_of
from marathon.records import (
    Asked,
    Injected,
    LogLine,
    Result,
    Sample,
    Settings,
)
from marathon.report import write_report
from marathon.verdict import growth_of, judge, mark_lost, windows_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from meridian_patch.errors import BenchError

KINDS = tuple(SHAPES)
FAULT = Fault("peer", "answer", 100)
WARM = {"think-1": 0.0}
KILLED = Injected(FAULT, 100.0, back_s=118.0, must_return=True)
SEEN = replace(KILLED, fault=Fault("peer", "think-1", 100))
UNSEEN = "errors within each window in which no think server is killed"


def asked(begin_s: float, end_s: float, outcome="ok", **more) -> Asked:
    return Asked(begin_s, more.pop("is_canary", False), True, end_s, outcome, **more)


def flat(mib: float = 900.0, last_s: int = 300, name: str = "think-1") -> list[Sample]:
    return [Sample(at_s, 8, 2, {name: mib}) for at_s in range(last_s)]


def verdicts(requests=None, injections=(KILLED,), samples=None, lines=()) -> dict[str, bool]:
    requests = steady() if requests is None else requests
    samples = flat() if samples is None else samples
    noted = Result(requests, list(injections), samples, list(lines), WARM, {"moved": 9})
    checks = judge(noted, {"peer"})
    return {check.name: check.is_met for check in checks}


def steady(length_s: int = 300) -> list[Asked]:
    return [asked(second, second + 1, is_canary=True, is_equal=True) for second in range(length_s)]


def recovery_s(injected: Injected, requests: list[Asked]) -> float | None:
    return windows_of([injected], requests)[0].recovery_s


def failing(names: dict[str, bool]) -> list[str]:
    return [name for name, is_met in names.items() if not is_met]


def test_a_plan_goes_round_and_strikes_each_engine():
    faults = plan_faults(3600, KINDS)
    assert [fault.kind for fault in faults[: len(KINDS)]] == list(KINDS)
    for number, engine in enumerate(STRUCK):
        round_of = faults[number * len(KINDS) : (number + 1) * len(KINDS)]
        assert {fault.engine for fault in round_of} == {engine}
    for one, two in pairwise(faults):
        assert two.at_s == pytest.approx(one.window_end_s + REST_S)
    assert faults[-1].window_end_s <= 3600
    # Ten minutes hold each kind once at least.
    assert {fault.kind for fault in plan_faults(600, KINDS)} == set(KINDS)
    assert plan_faults(600, ()) == []


def test_too_short_a_marathon_is_refused():
    with pytest.raises(BenchError, match=r"lasts 3 minutes, expected at least \d"):
        plan_faults(180, KINDS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minutes", "0"], "--minutes is '0'"),
        (["--concurrency", "none"], "--concurrency is 'none'"),
        (["--pause-s", "-1"], "--pause-s is '-1'"),
        (["--faults", "peer,flood"], "expected some of peer, api-server"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(BenchError, match=said):
        read_settings(parse(options))


def test_a_quiet_marathon_passes():
    assert failing(verdicts()) == []


def test_errors_count_where_they_happen():
    """A request that overlaps a window belongs to it; cancelled ones count nowhere."""
    wrong = [asked(10, 11, "error") for _ in range(4)]
    assert failing(verdicts(steady() + wrong)) == ["errors outside of windows"]
    cancelled = [asked(10, 11, "cancelled") for _ in range(40)]
    assert failing(verdicts(steady() + cancelled)) == []
    one = [asked(95, 101, "error")]
    assert failing(verdicts(steady() + one)) == [UNSEEN]
    assert failing(verdicts(steady() + one * 4, [SEEN])) == []
    many = failing(verdicts(steady() + one * 8, [SEEN]))
    assert many == ["errors within each window of a killed think server"]


def test_what_breaks_off_with_a_think_server_is_lost():
    """Soon after it was killed, and with it alone; most of those in flight must go on."""
    cut = {"outcome": "error", "is_cut": True}
    there, late = asked(95, 101, **cut), asked(95, 108, **cut)
    sent_later, refused = asked(100.5, 101, **cut), asked(95, 101, "error")
    mark_lost([there, late, sent_later, refused], [SEEN])
    assert [each.outcome for each in (there, late, sent_later, refused)] == ["lost", *["error"] * 3]
    elsewhere = asked(95, 101, **cut)
    mark_lost([elsewhere], [KILLED])
    assert elsewhere.outcome == "error"
    (window,) = windows_of([SEEN], [*steady(), there])
    assert (window.num_lost, window.num_errors, window.num_in_flight) == (1, 0, 3)
    assert failing(verdicts([*steady(), there], [SEEN])) == []
    all_of_them = [*steady(), *[there] * 12]
    name = "requests lost with their think server, of those in flight then"
    assert failing(verdicts(all_of_them, [SEEN])) == [name]


def test_some_request_must_have_moved():
    noted = Result(steady(), [KILLED], flat(), warmed=WARM, handoffs={"answered_at_home": 3})
    failed = [check for check in judge(noted, {"peer"}) if not check.is_met]
    assert [(check.name, check.value) for check in failed] == [
        ("requests that answered at the answer engine", "0 of 3 (0%)")
    ]


@pytest.mark.parametrize(("program", "package"), [(None, "nixl"), ("/bin/vllm-router", None)])
def test_what_is_missing_is_said(monkeypatch, program, package):
    monkeypatch.setattr(fleet.shutil, "which", lambda *_, **__: program)
    monkeypatch.setattr(fleet.importlib.util, "find_spec", lambda _: package)
    with pytest.raises(BenchError, match=r"vllm-router|nixl.*scripts/setup --nightly"):
        fleet.find_gateway()


def test_the_service_recovers_with_the_last_error_or_wrong_token():
    """Not with the process that was killed: another one serves meanwhile. It must be back, too."""
    ended = steady()
    assert recovery_s(KILLED, ended) == pytest.approx(1)
    slow = replace(KILLED, back_s=183.0)
    assert recovery_s(slow, ended) == pytest.approx(1)
    assert failing(verdicts(injections=[slow])) == []
    wrong = [*ended, asked(111, 112.5, is_canary=True, is_equal=False)]
    assert recovery_s(KILLED, wrong) == pytest.approx(13)
    late = [*ended, asked(120, 131.5, "error")]
    assert recovery_s(SEEN, late) == pytest.approx(32)
    assert failing(verdicts(late, [SEEN])) == ["recovery of the service"]
    lost = [replace(KILLED, back_s=None)]
    assert failing(verdicts(injections=lost)) == ["killed processes are back"]
    # What was sent before the fault does not show that it is over.
    before = [asked(99, 110), asked(101, 140)]
    assert recovery_s(KILLED, before) == pytest.approx(40)


def test_a_request_belongs_to_the_last_fault_that_began_before_its_end():
    """Else an error of the next fault would be this one's, and it would never recover."""
    frozen = Injected(Fault("frozen", "answer", 140), 140.0)
    broken = asked(138, 141, "error")
    first, second = windows_of([KILLED, frozen], [*steady(), broken])
    assert (first.num_errors, second.num_errors) == (0, 1)
    assert first.recovery_s == pytest.approx(1)
    assert second.recovery_s == pytest.approx(1)
    # It was in flight in the window of the first, and ended before the second began.
    own = asked(130, 139, "error")
    first, second = windows_of([KILLED, frozen], [*steady(), own])
    assert (first.num_errors, second.num_errors) == (1, 0)
    assert first.recovery_s == pytest.approx(39)
    # The windows and the time outside of them share all requests out among them.
    assert first.num_requests + second.num_requests < 301
    outside = [each for each in steady() if each.end_s < 100 or each.begin_s > frozen.end_s]
    assert first.num_requests + second.num_requests + len(outside) == 301


def test_one_wrong_canary_fails():
    wrong = asked(20, 21, is_canary=True, is_equal=False)
    assert failing(verdicts([*steady(), wrong])) == ["canaries with the tokens of one engine"]
    none = [replace(each, is_canary=False, is_equal=None) for each in steady()]
    assert failing(verdicts(none)) == ["canaries with the tokens of one engine"]


def test_memory_must_be_flat_once_warm():
    rising = [Sample(s, 8, 2, {"think-1": 900 + s / 4}) for s in range(600)]
    assert growth_of(rising, WARM)["think-1"] == pytest.approx(0.107, abs=0.01)
    assert failing(verdicts(samples=rising)) == ["growth of an EngineCore's memory"]
    loading = [Sample(s, 8, 2, {"think-1": min(900.0, 300 + 20.0 * s)}) for s in range(300)]
    assert growth_of(loading, WARM)["think-1"] == 0
    # It thinks for the first time at 200 s, alone: what it grows by then is no leak.
    first = [Sample(s, 8, 2, {"think-1": 900.0 + 100 * (s > 200)}) for s in range(600)]
    assert growth_of(first, WARM)["think-1"] > 0.1
    assert growth_of(first, {"think-1": 210.0})["think-1"] == 0
    assert growth_of(first, {}) == {}
    # A life that a fault ended early says nothing, and some life must say something.
    assert growth_of(flat(last_s=100), WARM) == {}
    assert failing(verdicts(samples=flat(last_s=100))) == ["growth of an EngineCore's memory"]


def test_missing_faults_and_log_lines_fail():
    assert "kinds of fault injected" in failing(verdicts(injections=[]))
    lines = [LogLine("think.log", "Traceback (most recent call last)")]
    assert failing(verdicts(lines=lines)) == ["forbidden lines in logs"]
    assert failing(verdicts(lines=[replace(lines[0], known="the collector was slow")])) == []


def test_logs_are_searched(tmp_path):
    log = tmp_path / "think.log"
    log.write_text("INFO fine\nERROR broken\nTraceback (most recent call last)\n")
    assert [line.text for line in read_logs([log])] == [
        "ERROR broken",
        "Traceback (most recent call last)",
    ]


def test_a_record_with_a_known_reason_is_known_as_a_whole(tmp_path):
    """Its traceback ends with the reason; other processes write between its lines."""
    head = "(EngineCore pid=7) ERROR 11-25 04:19:01 [pull_worker.py:562]"
    other = "(APIServer pid=6) ERROR 11-25 04:19:01 [serving.py:12] broken"
    record = [
        f"{head} NIXL transfer failure: transfer_setup_failed",
        f"{head} Traceback (most recent call last):",
        other,
        f"{head}   File 'pull_worker.py', line 547",
        f"{head} nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT",
    ]
    # The next record of the same place and second has no known reason.
    next_one = [
        f"{head} NIXL transfer failure: transfer_setup_failed",
        f"{head} Traceback (most recent call last):",
        f"{head} AssertionError",
        # The plug-in's own failure has none either, whatever caused it.
        f"{head} meridian_patch: the hand-off failed for request r; NIXL_ERR_REMOTE_DISCONNECT",
    ]
    log = tmp_path / "answer.log"
    log.write_text("\n".join([*record, *next_one]))
    lines = read_logs([log])
    forbidden = [line.text for line in lines if not line.known]
    assert forbidden == [other, *next_one]
    assert len(lines) == len(forbidden) + 4
    assert {line.known for line in lines} - {""} == {
        "an engine was killed while its blocks were read: vLLM computes them again"
    }


def test_a_handshake_that_a_frozen_engine_did_not_answer_is_known(tmp_path):
    head = "(EngineCore pid=7) ERROR 11-28 08:57:43 [base_worker.py:1318]"
    log = tmp_path / "answer.log"
    log.write_text(
        f"{head} NIXL transfer failure: handshake_setup_failed | Context: {{}}\n"
        f"{head} Traceback (most recent call last):\n"
        f"{head} zmq.error.Again: Resource temporarily unavailable\n"
    )
    lines = read_logs([log])
    assert len(lines) == 3
    assert all("frozen" in line.known for line in lines)


RESTS = "ERROR meridian_patch: answer engine http://a:1 rests for 2 s, and requests answer here:"
GATEWAY = "\x1b[31mERROR\x1b[0m router.rs:"


@pytest.mark.parametrize(
    ("line", "is_known"),
    [
        (f"{RESTS} ServerDisconnectedError Server disconnected", True),
        (f"{RESTS} its block_size is '16', expected '32' as here", False),
        ("ERROR meridian_patch: requests answer where they thought: http://a:1: HTTP 400", False),
        (f"{GATEWAY} Failed to send typed request url=a error=error sending request for a", True),
        (f"{GATEWAY} no worker is left", False),
    ],
)
def test_a_lost_server_is_known_and_a_wrong_one_is_not(tmp_path, line, is_known):
    """Also in vllm-router's log, which has colours."""
    log = tmp_path / "log"
    log.write_text(line)
    (found,) = read_logs([log])
    assert bool(found.known) == is_known


def test_the_report_has_all_of_it(tmp_path):
    settings = Settings(tmp_path, 300, 8, 0, [FAULT], 1)
    requests = [*steady(), asked(101, 102, "error", why="HTTP 503")]
    result = Result(requests, [SEEN], flat(), warmed=WARM, handoffs={"moved": 250})
    checks = write_report(tmp_path, settings, result, "`scripts/marathon`, `measured-cpu`.")
    page = (tmp_path / "report.md").read_text()
    assert all(check.name in page for check in checks)
    assert "**Passed.**" in page
    assert "| 1 | HTTP 503 |" in page
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["faults"][0]["errors"] == 1
    noted = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(noted) == 301
    assert noted[-1]["why"] == "HTTP 503"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


LEADER = """
import subprocess, sys, http.server
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked", flush=True)
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_killed_server_is_started_again_without_its_orphans(tmp_path):
    port = _free_port()
    command = [sys.executable, "-c", LEADER, str(port)]
    server = Supervised("server", command, {}, tmp_path / "log", port)

    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            server.start()
            keeper = asyncio.ensure_future(server.supervise())
            await server.wait_until_healthy(http)
            old = server.pid
            assert len(list(processes_of(old))) == 2
            server.kill_leader()
            await server.wait_for_another(old)
            await server.wait_until_healthy(http)
            assert (server.num_orphans, list(processes_of(old))) == (1, [])
            server.limit_files(0)
            written = server.log.stat().st_size
            await server.is_healthy(http)
            assert server.log.stat().st_size == written
            keeper.cancel()

    try:
        asyncio.run(run())
    finally:
        server.stop()
    # The last one was killed, and ends soon.
    deadline = time.monotonic() + 10
    while list(processes_of(server.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _free_port() -> int:
    from meridian_patch.bench.served.server import pick_port

    return pick_port()


class Server:
    """Answers chat completions; fails as often as told first."""

    def __init__(self, num_failures: int = 0, tokens: tuple[int, ...] = (1, 2)) -> None:
        self.num_failures = num_failures
        self.tokens = tokens

    async def chat(self, request: Request):
        body = await request.json()
        if self.num_failures:
            self.num_failures -= 1
            return JSONResponse({"error": {"message": "no"}}, HTTPStatus.SERVICE_UNAVAILABLE)
        said = {"reasoning": "hm", "content": "6"}
        choice = {"index": 0, "token_ids": list(self.tokens), "finish_reason": "stop"}
        if not body.get("stream"):
            return JSONResponse({"choices": [choice | {"message": said}]})
        text = f"data: {json.dumps({'choices': [choice | {'delta': said}]})}\n\ndata: [DONE]\n\n"
        return StreamingResponse(iter([text]))

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])


async def _served(app: Starlette, use) -> None:
    import uvicorn

    port = _free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    task = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.02)
    try:
        await use(f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        await task


def play(stub: Server, length_s: float = 1.0) -> Load:
    """Load on this server for so long."""
    loads = []

    async def use(url: str) -> None:
        load = Load(url, "m", [Canary("q", (1, 2), ("hm", "6"))], ["r"], 2)
        await load.run(length_s)
        loads.append(load)

    asyncio.run(_served(stub.app(), use))
    return loads[0]


def test_load_compares_canaries():
    load = play(Server(), 3.0)
    outcomes = {each.outcome for each in load.asked}
    assert outcomes <= {"ok", "cancelled"}
    assert {each.is_equal for each in load.asked if each.is_canary} <= {True, None}
    assert any(each.is_equal for each in load.asked)
    assert load.in_flight == 0
    wrong = play(Server(tokens=(1, 3)), 3.0)
    assert any(each.is_equal is False for each in wrong.asked)


def test_a_request_is_sent_again_before_its_response_only():
    load = play(Server(num_failures=2))
    assert sum(each.num_retries for each in load.asked) == 2
    assert "error" not in {each.outcome for each in load.asked}
    assert {each.outcome for each in play(Server(num_failures=1000), 0.2).asked} == {"error"}


def test_a_canary_is_learned():
    async def use(url: str) -> None:
        assert await know(url, "m", "q") == Canary("q", (1, 2), ("hm", "6"))

    asyncio.run(_served(Server().app(), use))


def test_a_proxy_resets_both_sides():
    async def run() -> None:
        ends = []
        is_over = asyncio.Event()

        async def echo(reader, writer):
            try:
                while piece := await reader.read(100):
                    writer.write(piece)
            except OSError as error:
                ends.append(type(error))
            is_over.set()

        target = await asyncio.start_server(echo, "127.0.0.1", 0)
        proxy = Proxy(target.sockets[0].getsockname()[1])
        await proxy.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"hello")
        assert await reader.read(100) == b"hello"
        proxy.reset(1.0)
        with pytest.raises(ConnectionResetError):
            await reader.read(100)
        await asyncio.wait_for(is_over.wait(), 10)
        assert (ends, proxy.num_reset) == ([ConnectionResetError], 1)
        proxy.close()
        target.close()
        # Without a server behind it, a connection breaks.
        other = Proxy(_free_port())
        await other.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", other.port)
        with pytest.raises(ConnectionResetError):
            await reader.read(100)
        other.close()

    asyncio.run(run())


def test_a_slow_collector_answers_late():
    async def run() -> None:
        collector = Collector()
        await collector.start()
        async with aiohttp.ClientSession() as http:
            for delay_s in (0.0, 0.3):
                collector.delay_s = delay_s
                begin = asyncio.get_running_loop().time()
                async with http.post(collector.endpoint, data=b"spans") as reply:
                    assert reply.status == HTTPStatus.OK
                assert asyncio.get_running_loop().time() - begin >= delay_s
        assert collector.num_exports == 2
        collector.close()

    asyncio.run(run())
