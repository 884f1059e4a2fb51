"""``meridian policy``: what it asks a server, and what it says of the replies."""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from meridian_patch.cli import main
from meridian_patch.operate.options import add_api_key, api_key

IN_FORCE = {"rank": 0, "policy": "noop", "exit": "observe", "started_as": "latency, observe"}


class Replies:
    """A server that replies the same to all, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, {"engines": [IN_FORCE]}, []
        self.keys = []
        replies = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                replies.asked.append((self.command, self.path, self.rfile.read(length).decode()))
                replies.keys.append(self.headers.get("Authorization"))
                self.send_response(replies.status)
                self.end_headers()
                self.wfile.write(json.dumps(replies.body).encode())

            def log_message(self, *_) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server():
    replies = Replies()
    yield replies
    replies.close()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["policy", *arguments])
    return ended.value.code


def test_shows_each_engine(server, capsys) -> None:
    server.body["engines"].append(IN_FORCE | {"policy": "latency", "rank": 3})
    assert run("show", "--url", server.url) == 0
    assert capsys.readouterr().out.splitlines() == [
        "engine 0  policy noop  early exit observe  (started as latency, observe)",
        "engine 3  policy latency  early exit observe",
    ]
    assert server.asked == [("GET", "/v1/meridian/policy", "")]


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        (["noop"], {"policy": "noop"}),
        (["--exit", "off"], {"exit": "off"}),
        (["latency", "--exit", "enforce"], {"policy": "latency", "exit": "enforce"}),
    ],
)
def test_asks_for_what_was_named_alone(server, arguments, body) -> None:
    assert run("set", *arguments, "--url", server.url) == 0
    ((command, _, asked),) = server.asked
    assert (command, json.loads(asked)) == ("POST", body)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, {}, "expected a server that was started with VLLM_PLUGINS=meridian_patch,meri"),
        (401, {}, "asks for its API key"),
        (409, {"error": {"message": "the engine runs stock vLLM"}}, "the engine runs stock vLLM"),
        (200, {"engines": None}, "HTTP 200"),
        (500, {"error": "no"}, "HTTP 500"),
    ],
)
def test_says_why_nothing_was_switched(server, capsys, status, body, message) -> None:
    server.status, server.body = status, body
    assert run("set", "noop", "--url", server.url) == 1
    assert message in capsys.readouterr().err


def test_what_an_engine_refuses_fails(server, capsys) -> None:
    server.body["engines"].append(IN_FORCE | {"refused": "exit is 'enforce', expected at most"})
    assert run("set", "noop", "--exit", "enforce", "--url", server.url) == 1
    assert "engine 0  refused: exit is 'enforce', expected at" in capsys.readouterr().out


def test_vllms_own_variable_is_the_key_of_a_server_here(server, monkeypatch, tmp_path) -> None:
    """As in the container of a pod; a file that is named comes first."""
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server\n")
    assert run("show", "--url", server.url) == 0
    file = tmp_path / "key"
    file.write_text("of-the-file")
    assert run("show", "--url", server.url, "--api-key-file", str(file)) == 0
    assert server.keys == ["Bearer of-the-server", "Bearer of-the-file"]


@pytest.mark.parametrize("key", ["two\nlines", "s\u20accret"])
def test_a_key_that_is_none_is_not_quoted(server, monkeypatch, capsys, key) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert run("show", "--url", server.url) == 1
    said = capsys.readouterr().err
    assert "environment variable VLLM_API_KEY must hold one key" in said
    assert key[:3] not in said
    assert not server.asked


def test_no_other_host_gets_that_key(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-the-server")
    parser = argparse.ArgumentParser()
    add_api_key(parser)
    assert api_key(parser.parse_args([]), "http://elsewhere.example:8000") is None
    assert api_key(parser.parse_args([]), "localhost:8000") == "of-the-server"
    assert api_key(parser.parse_args([]), None) is None


def test_without_a_wish(capsys) -> None:
    assert run("set") == 1
    assert "expected a policy, or --exit and a mode" in capsys.readouterr().err
