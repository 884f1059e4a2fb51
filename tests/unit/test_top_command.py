"""`meridian top`: once, live, recorded and replayed, against servers that are not vLLM's."""

import json
import os
import pty
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from fake_server import serving

from meridian_patch import cli
from meridian_patch.operate.top import recording

RECORDING = Path(__file__).parents[1] / "support" / "recordings" / "seats.txt"


@pytest.fixture
def server():
    with serving() as started:
        started.replies["/metrics"] = (200, started.page.text())
        yield started


def run(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", *map(str, arguments)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return ended.value.code, printed


def test_once(server, capsys):
    """Two scrapes, one screen; the same as one JSON object."""
    code, printed = run([server.url, "--once", "--interval", 0.1], capsys)
    assert code == 0
    assert "running 2   waiting 0" in printed.out
    assert "bottleneck: none" in printed.out
    code, printed = run([server.url, "--once", "--interval", 0.1, "--json"], capsys)
    assert json.loads(printed.out)["load"]["running"] == 2.0


def test_stock_vllm_is_shown_as_far_as_it_tells(server, capsys):
    server.page.is_patched = False
    server.replies["/metrics"] = (200, server.page.text())
    code, printed = run([server.url, "--once", "--interval", 0.1], capsys)
    assert code == 0
    assert "this server runs stock vLLM" in printed.out


def test_a_server_without_statistics_is_told_its_option(server, capsys):
    """vLLM says nothing of requests then, and neither do we: stock is not the cause."""
    server.page.is_patched = server.page.has_stats = False
    server.replies["/metrics"] = (200, server.page.text())
    code, printed = run([server.url, "--once", "--interval", 0.1], capsys)
    assert code == 0
    assert "unknown: this server has --disable-log-stats" in printed.out
    assert "stock" not in printed.out
    server.replies["/metrics"] = (200, "http_requests_total 8\n")
    code, printed = run([server.url, "--once"], capsys)
    assert code == 1
    assert "--disable-log-stats" in printed.err


@pytest.mark.parametrize(
    ("reply", "message"),
    (
        ((200, "go_threads 8\n"), "another program"),
        ((200, "vllm:x 1\nvllm:y"), "cut off"),
        ((200, "<p>\n"), "no page of metrics"),
        ((401, "who are you?"), "HTTP 401: who are you?"),
    ),
)
def test_a_page_that_cannot_be_read_is_one_line(server, reply, message, capsys):
    server.replies["/metrics"] = reply
    code, printed = run([server.url, "--once"], capsys)
    assert code == 1
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("url", ("http://127.0.0.1:1", "127.0.0.1:1", "nonsense"))
def test_an_address_that_cannot_be_reached_is_one_line(url, capsys):
    for arguments in ([url, "--once"], [url]):
        code, printed = run(arguments, capsys)
        assert code == 1
        assert len(printed.err.splitlines()) == 1


def test_what_is_recorded_can_be_replayed(server, tmp_path, capsys):
    """The recording's last window is the one that was shown."""
    file = tmp_path / "recorded.txt"
    arguments = [server.url, "--once", "--interval", 0.1, "--json"]
    _, shown = run([*arguments, "--record", file], capsys)
    assert len(list(recording.read(file))) == 2
    code, replayed = run(["--replay", file, "--once", "--json"], capsys)
    assert code == 0
    was, now = json.loads(shown.out), json.loads(replayed.out)
    # Times are recorded in milliseconds.
    assert was.pop("window_s") == pytest.approx(now.pop("window_s"), abs=0.002)
    assert was["load"]["requests"] == now["load"]["requests"]
    assert was["verdict"] == now["verdict"]


def test_recordings_are_marked_with_the_time_of_day(server, tmp_path, capsys):
    """A later start of the machine may add to the same file."""
    file, before = tmp_path / "recorded.txt", time.time()
    run([server.url, "--once", "--interval", 0.1, "--record", file], capsys)
    times = [scrape.at_s for scrape in recording.read(file)]
    assert before - 1 < times[0] < times[1] < time.time() + 1


def test_windows_that_run_backwards_are_left_out(tmp_path, capsys):
    """A clock that was set back: no negative rate is shown."""
    file, page = tmp_path / "recorded.txt", "vllm:x 1\n"
    for at_s in (9.0, 11.0, 3.0, 3.0, 4.0):
        recording.append(file, page, at_s)
    code, printed = run(["--replay", file, "--json"], capsys)
    assert code == 0
    assert [json.loads(line)["window_s"] for line in printed.out.splitlines()] == [2.0, 1.0]


def test_a_reader_that_has_enough_ends_the_command_quietly():
    """As with `meridian top --json | head -1`."""
    code = (
        "import sys; from meridian_patch import cli; sys.stdin.readline();"
        f"cli.main(['top', '--replay', {str(RECORDING)!r}, '--json'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    with process.stderr:
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


def test_replay_shows_every_window(capsys):
    code, printed = run(["--replay", RECORDING, "--json"], capsys)
    assert code == 0
    assert len(printed.out.splitlines()) == 2


def test_a_recording_that_was_cut_off_names_the_page(tmp_path, capsys):
    """As when the machine stopped while a page was written."""
    file = tmp_path / "recorded.txt"
    file.write_text(RECORDING.read_text()[:-30])
    code, printed = run(["--replay", file], capsys)
    assert code == 1
    assert printed.err == (
        f"meridian: recording {file}, page 3: the page of metrics is cut off: "
        "its last line has no end\n"
    )


@pytest.mark.parametrize("text", ("", "vllm:x 1\n", "# meridian scrape at 1 s\nvllm:x 1\n"))
def test_a_file_that_is_no_recording_is_one_line(text, tmp_path, capsys):
    file = tmp_path / "other.txt"
    file.write_text(text)
    for path in (file, tmp_path / "none.txt", tmp_path):
        code, printed = run(["--replay", path], capsys)
        assert code == 1
        assert len(printed.err.splitlines()) == 1


def test_q_quits_and_an_outage_is_waited_for(server):
    """Live, on a terminal: a failed scrape is one line, and the next one is drawn again."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "top", server.url]
    process = subprocess.Popen(
        [*command, "--interval", "0.1"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.close(theirs)
    try:
        whole = server.replies["/metrics"]
        asked = server.num_asked
        for reply in (whole, (503, "starting"), whole):
            server.replies["/metrics"] = reply
            wait_until(lambda seen=asked: server.num_asked >= seen + 3)
            asked = server.num_asked
        os.write(ours, b"q")
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0, text
    assert "bottleneck: none" in text
    assert "Traceback" not in text


def wait_until(is_done, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_each_window_is_printed_where_nothing_can_be_drawn_over(server):
    """Into a pipe, or on a terminal without movement: live, not all at the end."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "top", server.url]
    with subprocess.Popen(
        [*command, "--interval", "0.1"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            heads = [line for line in islice(process.stdout, 40) if line.startswith("meridian top")]
        finally:
            process.send_signal(2)
            process.stdout.close()
    assert len(heads) > 2


def test_live_json_is_one_object_per_line(server):
    """Errors too; it ends with an interrupt."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "top", server.url, "--json"]
    with subprocess.Popen(
        [*command, "--interval", "0.1"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            first = json.loads(process.stdout.readline())
            server.replies["/metrics"] = (503, "down")
            told = first
            while "error" not in told:
                told = json.loads(process.stdout.readline())
        finally:
            process.send_signal(2)
    assert first["load"]["running"] == 2.0
    assert "HTTP 503" in told["error"]
    assert process.returncode == 0
