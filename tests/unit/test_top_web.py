"""`meridian top --web` without a browser: what it serves, to whom, and what it refuses."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_server import Page, serving

from meridian_patch import cli
from meridian_patch.exit.strategies.build import REASONS
from meridian_patch.operate.http_client import ServerClient
from meridian_patch.operate.scrape import ScrapeError, parse
from meridian_patch.operate.top.source import LiveServer, recorded
from meridian_patch.operate.top.view import LATENCIES, view
from meridian_patch.operate.top.web import server as web
from meridian_patch.operate.top.web.command import show_recording
from meridian_patch.operate.top.web.history import KEPT, History, phases
from meridian_patch.telemetry.metrics import METRICS

RECORDING = Path(__file__).parents[1] / "support" / "recordings" / "seats.txt"


@pytest.fixture
def history():
    """Both windows of a recording."""
    made = History("seats.txt", None)
    for ended_at_s, shown in recorded(RECORDING):
        made.add(ended_at_s, shown)
    return made


@pytest.fixture
def ask(history):
    """``ask(path, **headers)``: status, headers and text of a reply."""
    with web.serving(history, "127.0.0.1", 0) as (address, is_loopback):
        assert is_loopback
        port = int(address.rpartition(":")[2])

        def get(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers={"Host": f"127.0.0.1:{port}"} | named)
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read().decode()

        yield get


def test_the_page_and_its_parts_are_served(ask):
    """All of it from here: nothing may be loaded from elsewhere, nor run from within the page."""
    for path, kind in (
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
        ("/chart.js", "text/javascript"),
        ("/words.js", "text/javascript"),
    ):
        status, headers, text = ask(path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert "innerHTML" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("HTTP", "")
    assert ask("/../server.py")[0] == ask("/server.py")[0] == 404
    assert ask("/", method="POST")[0] == 501


def test_the_windows_are_those_that_the_terminal_shows(ask, capsys):
    """The same numbers as `meridian top --replay --json`."""
    with pytest.raises(SystemExit):
        cli.main(["top", "--replay", str(RECORDING), "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    status, headers, text = ask("/points?run=&after=0")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    told = json.loads(text)
    assert [point["view"] for point in told["points"]] == lines
    assert told["points"][0]["phases"] == {
        "answer": 3.0,
        "think": 5.0,
        "prefill": 0.0,
        "waiting": 67.0,
    }
    assert (told["source"], told["interval_s"]) == ("seats.txt", None)


def test_every_name_that_we_send_has_words_and_a_colour(ask):
    """A phase, reason or tier that is new must be explained on the page too."""
    text = ask("/words.js")[2]
    words, _, colours = text.partition("const COLOURS")
    shown = ("meridian_requests", "meridian_preemptions", "meridian_thoughts_ended")
    names = {
        value
        for metric in METRICS
        if metric.name in {*shown, "meridian_kv_evictions", "meridian_kv_hit_tokens"}
        for value in metric.values
    }
    assert {"think", "natural", "in_use"} <= names
    for name in names:
        assert f"  {name}: " in words
        # A new reason has a colour by its place.
        has_colour = re.search(rf"\b{name}: \"", colours.partition("};")[0])
        assert has_colour or name in REASONS
    for name in LATENCIES:
        assert f'  "{name}": ' in words + colours


@pytest.mark.parametrize("after", ("x", "-1", "1" * 5000, "%00", "1.5", ""))
def test_a_strange_question_gets_all_windows(ask, after):
    run = json.loads(ask("/points")[2])["run"]
    assert len(json.loads(ask(f"/points?run={run}&after={after}")[2])["points"]) == 2


def test_a_page_is_told_only_what_it_lacks(ask):
    """A page that was opened before a restart of the program is told all."""
    run = json.loads(ask("/points")[2])["run"]

    def numbers(run, after):
        told = json.loads(ask(f"/points?run={run}&after={after}")[2])
        return [point["number"] for point in told["points"]]

    assert numbers(run, 0) == [1, 2]
    assert numbers(run, 1) == [2]
    assert numbers(run, 2) == []
    assert numbers("before", 2) == [1, 2]


@pytest.mark.parametrize(
    ("headers", "status"),
    (
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:9000"}, 200),
        ({"Host": "127.0.0.1:9000"}, 200),
        ({"Host": "rebound.example:8090"}, 403),
        ({"Host": "localhost.rebound.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[bad"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
    ),
)
def test_other_sites_get_no_data(ask, headers, status):
    """Neither by another name for this address (DNS rebinding), nor from a page of their own."""
    got, sent, text = ask("/points", **headers)
    assert got == status
    assert ("points" in text) == (status == 200)
    assert "Access-Control-Allow-Origin" not in sent


def test_a_link_from_another_site_opens_the_page(ask):
    assert ask("/", Sec_Fetch_Site="cross-site")[0] == 200


def test_only_this_machine_can_connect_by_default(history):
    """Otherwise one is told."""
    with web.serving(history, "127.0.0.1", 0) as (_, is_loopback):
        assert is_loopback
    with web.serving(history, "0.0.0.0", 0) as (_, is_loopback):
        assert not is_loopback


def refused(arguments, capsys):
    """The exit code and the one line that the command ends with."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", "--web", *map(str, arguments)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return ended.value.code, printed.err.strip().splitlines()[-1]


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = refused(["--replay", RECORDING, "--port", port], capsys)
    assert code == 1
    assert line == (
        f"meridian: port {port} of 127.0.0.1 is in use; choose another one with --port, 0 for any"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    (
        (["--host", "192.0.2.1"], 1, "cannot be served at 192.0.2.1 port 8090"),
        (["--host", "no such name"], 1, "cannot be served at no such name"),
        (["--port", "65536"], 2, "no port between 0 and 65535"),
        (["--port", "x"], 2, "invalid port value"),
        (["--once"], 1, "--web goes with neither --once nor --json"),
        (["ftp://localhost:8000"], 1, "is no http://host:port"),
        (["--replay", "none.txt"], 1, "recording none.txt cannot be read"),
    ),
)
def test_what_cannot_be_served_is_one_line(arguments, code, words, capsys):
    got, line = refused(arguments, capsys)
    assert got == code
    assert words in line


def test_options_of_the_page_need_the_page(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", "--port", "8090"])
    assert ended.value.code == 1
    assert "add --web" in capsys.readouterr().err


def test_outages_foreign_pages_and_restarts_are_told_and_recovered_from():
    """One window each: whatever the server replies, the next whole page is shown again."""
    page = Page()
    page.changes["meridian_thoughts_ended_total", "natural"] = 8.0
    whole = page.text()
    page.changes["meridian_thoughts_ended_total", "natural"] = 3.0
    anew = page.text()
    replies = [
        (503, "starting"),
        (200, whole),
        (200, whole),
        (200, "go_threads 8\n"),
        (200, whole[:-30]),
        (200, "<html>"),
        (200, anew),
        (200, anew),
    ]
    with serving() as fake:
        live = LiveServer(ServerClient(fake.url), None)
        left = list(replies)

        def is_ended():
            if left:
                fake.replies["/metrics"] = left.pop(0)
                return False
            return True

        history = History(fake.url, 2.0)
        for shown in live.watch(None, is_ended):
            history.add(time.time(), shown)
    told = history.since("", 0)["points"]
    errors = [point["error"] for point in told]
    assert "HTTP 503: starting" in errors[0]
    assert errors[1] is errors[5] is errors[6] is None
    assert "another program" in errors[2]
    assert "cut off" in errors[3]
    assert "cut off" in errors[4]
    resets = [bool(point["view"] and point["view"]["is_reset"]) for point in told]
    assert resets == [False, False, False, False, False, True, False]
    assert told[5]["view"]["exits"]["natural"] == 3.0


def test_a_server_that_is_not_up_yet_is_waited_for():
    """The command may be started before the server."""
    live = LiveServer(ServerClient("http://127.0.0.1:1"), None)
    ends = iter((False, False, True))
    seen = list(live.watch(None, lambda: next(ends)))
    assert len(seen) == 2
    assert all("http://127.0.0.1:1 cannot be reached" in str(each) for each in seen)


def test_only_the_last_windows_of_a_running_server_are_kept():
    """A recording is kept whole."""
    for interval_s, kept in ((2.0, KEPT), (None, KEPT + 5)):
        history = History("x", interval_s)
        for number in range(KEPT + 5):
            history.add(float(number), ScrapeError("gone"))
        told = history.since("", 0)
        assert len(told["points"]) == kept
        assert told["first"] == told["points"][0]["number"] == KEPT + 5 - kept + 1


def strange(value):
    return parse(
        f'vllm:num_requests_running{{model_name="<b>"}} {value}\n'
        f"vllm:num_requests_waiting {value}\nvllm:generation_tokens_total {value}\n"
        f'meridian_requests{{phase="prefill"}} {value}\nmeridian_requests{{phase="think"}} 1\n'
        f"vllm:kv_cache_usage_perc {value}\n",
        1.0,
    )


@pytest.mark.parametrize("value", ("NaN", "+Inf", "-Inf", "-1"))
def test_numbers_that_are_none_are_no_trouble(value):
    """JSON that every browser reads, whatever stands on the page."""
    history = History("x", 2.0)
    history.add(1.0, view(parse("vllm:x 1\n", 0.0), strange(value)))
    text = json.dumps(history.since("", 0), allow_nan=False)
    assert json.loads(text)["points"][0]["view"]["model"] == "<b>"


def queue(waiting, phases=""):
    """A page with 3 running requests."""
    return f"vllm:num_requests_running 3\nvllm:num_requests_waiting {waiting}\n{phases}"


PHASES = 'meridian_requests{phase="prefill"} 3\nmeridian_requests{phase="think"} 4\n'


@pytest.mark.parametrize(
    ("page", "expected"),
    (
        ("vllm:x 1\n", {}),
        (queue(2), {"running": 3.0, "waiting": 2.0}),
        (queue(2, PHASES), {"answer": 0.0, "think": 4.0, "prefill": 1.0, "waiting": 2.0}),
        (queue(5, PHASES), {"answer": 0.0, "think": 4.0, "prefill": 0.0, "waiting": 3.0}),
    ),
)
def test_every_request_is_in_one_band(page, expected):
    """Those in the queue that were preempted count in their phase, not as waiting."""
    scrape = parse(page, 0.0)
    assert phases(view(scrape, scrape).load) == expected


@contextmanager
def command(*arguments):
    """The command in a process, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "meridian_patch.cli", "top", "--web", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield process, line.split()[2]
        finally:
            process.kill()


def test_the_command_serves_until_an_interrupt():
    """A live server, with an address of any free port; no key is read."""
    with serving() as fake, command(fake.url, "--port", 0, "--interval", 0.1) as (process, url):
        connected = url.removeprefix("http://")
        deadline = time.monotonic() + 60
        told = {"points": []}
        while not told["points"]:
            assert time.monotonic() < deadline
            connection = http.client.HTTPConnection(connected, timeout=30)
            connection.request("GET", "/points")
            told = json.loads(connection.getresponse().read())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""
    assert told["points"][0]["view"]["load"]["running"] == 2.0
    assert told["source"] == fake.url


def test_a_wider_host_is_warned_of(capsys):
    for host, is_warned in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
        show_recording(RECORDING, lambda: True, host, 0)
        printed = capsys.readouterr()
        assert printed.out.startswith(f"meridian top: http://{host}:")
        assert ("there is no password" in printed.err) == is_warned
