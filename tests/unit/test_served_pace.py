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

    def play(self, trace, records):
        [request] = trace
        records.append(RequestRecord(request, 0.0, token_s=self.token_s))


def test_the_fastest_server_says_what_a_token_takes():
    """A moment in which the machine is slow lengthens some gaps, or all of one server's."""
    slow, hit = Timed([1.0, 1.5, 2.0, 2.5]), Timed([1.0, 1.25, 9.0, 9.25, 9.5])
    assert token_time_s([slow, hit]) == 0.25
    assert token_time_s([Timed([]), slow]) == 0.5


def test_without_tokens_there_is_no_pace():
    """The error says which option needs none."""
    with pytest.raises(BenchError, match="--pause"):
        token_time_s([Timed([]), Timed([1.0])])


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
