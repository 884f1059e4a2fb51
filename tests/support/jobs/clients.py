"""Clients of a server of a test, each of which asks again as soon as it is answered."""

import http.client
import json
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from itertools import count

QUESTION = "p={}, q=p+5, r=q*3. r?"


@contextmanager
def clients(server, number: int, *, aborts: bool = False, padding: int = 0, **body):
    """So many ask while the block runs.

    Args:
        server: see ``run_server.py``.
        number: clients.
        aborts: at the end of the block they go away, and wait for no answer.
        padding: tokens by which each question is longer, none of which is cached.
        body: added to the body of a chat completion.
    """
    done, errors = threading.Event(), []

    def ask(who: int) -> None:
        try:
            for turn in count():
                if done.is_set():
                    return
                # The tiny reasoner's tokens are bytes.
                begin = f"{id(done)} {who} {turn} ".ljust(padding)[:padding]
                question = begin + QUESTION.format(1 + (who + 7 * turn) % 9)
                message = {"role": "user", "content": question}
                asked = {"messages": [message], "temperature": 1.0, "max_tokens": 300} | body
                _stream(server.port, asked, done if aborts else threading.Event())
        except Exception as error:
            errors.append(error)

    with in_threads(ask, range(number), done):
        yield
    assert not errors, errors[0]


@contextmanager
def in_threads(ask: Callable[[int], None], numbers: Iterable[int], done: threading.Event):
    """Call ``ask`` with each number in a thread of its own; ``done`` is set when the block ends."""
    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


def _stream(port: int, body: dict, goes_away: threading.Event) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        text = json.dumps(body | {"stream": True})
        connection.request(
            "POST", "/v1/chat/completions", text, {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        # vLLM aborts the request of a client that goes away.
        while not goes_away.is_set() and reply.readline():
            pass
    finally:
        connection.close()
