"""The time of a token, and pauses in it."""

from dataclasses import dataclass

import pytest

from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.pace import paced, token_time_s
from meridian_patch.bench.served.workload import Pause, Turns, make_conversations
from meridian_patch.errors import BenchError


@dataclass
class Timed:
    """A client whose request gets its tokens at these times."""

    token_s: list[float]
    error: str | None = None

    def play(self, trace, records, check_server):
        check_server()
        [request] = trace
        records.append(RequestRecord(request, 0.0, token_s=self.token_s, error=self.error))


def test_a_token_takes_what_all_take_on_average():
    """Also where a server streams several tokens in one piece."""
    one_by_one = Timed([1.0, 1.25, 1.5, 1.75, 2.0])
    pieces = Timed([1.0, 1.0, 2.0, 2.0, 2.0])
    for client in (one_by_one, pieces):
        assert token_time_s(client, lambda: None) == 0.25


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (Timed([]), "it gave 0 tokens"),
        (Timed([1.0]), "it gave 1 tokens"),
        (Timed([1.0, 1.0]), "it gave 2 tokens at one time"),
        (Timed([1.0, 2.0], "HTTP 400: no such model"), "no such model"),
    ],
)
def test_without_two_times_there_is_no_pace(client, reason):
    """The error says why, and which option needs none."""
    with pytest.raises(BenchError, match=f"{reason}.*--pause"):
        token_time_s(client, lambda: None)


def test_a_server_that_ended_is_noticed():
    """What the check raises ends the measurement."""

    def check():
        raise BenchError("the vLLM server ended")

    with pytest.raises(BenchError, match="the vLLM server ended"):
        token_time_s(Timed([1.0, 2.0]), check)


def test_only_pauses_are_in_tokens():
    """First turns come when they were drawn to; later ones wait so many tokens."""
    drawn = make_conversations(Turns(30, 2.0, Pause(100.0, "tokens")), 5)
    played = paced(drawn, 0.004)
    for before, after in zip(drawn, played, strict=True):
        factor = 0.004 if before.follows else 1.0
        assert after.arrival_s == pytest.approx(before.arrival_s * factor, abs=1e-6)
        assert after.messages == before.messages
    assert any(request.follows for request in drawn)


def test_a_pause_says_its_unit():
    """Seconds or tokens, as the report has it."""
    assert str(Pause(4.0)) == "4 s"
    assert "pauses of 180 tokens on average" in str(Turns(10, 1.0, Pause(180.0, "tokens")))
