"""What prompts show of the thoughts of their turns before."""

from meridian_patch.policy import history_evidence
from meridian_patch.policy.history_evidence import HistoryEvidence

# A turn: two blocks of its prompt, then its thought and its answer.
TURN = ["p1", "p2", "t1", "t2", "a1"]


def test_a_prompt_that_goes_on_with_the_thought_keeps_it():
    """One that goes on with anything else dropped it; one that ends there shows neither."""
    evidence = HistoryEvidence()
    assert evidence.of_prompt([*TURN, "u2"]) is None
    evidence.finished(TURN, 2)
    assert evidence.of_prompt([*TURN, "u2"]) is True
    assert evidence.of_prompt(["p1", "p2", "a1'", "u2'"]) is False
    assert evidence.of_prompt(["p1", "p2"]) is None
    assert evidence.of_prompt(["p1", "other"]) is None
    assert evidence.of_prompt([]) is None


def test_the_last_turn_counts():
    """A client may have changed its mind since the first one."""
    evidence = HistoryEvidence()
    evidence.finished(TURN, 2)
    second = ["p1", "p2", "a1'", "u2'", "t3"]
    evidence.finished(second, 4)
    assert evidence.of_prompt(["p1", "p2", "a1'", "u2'", "t3", "a2"]) is True


def test_what_a_turn_does_not_show_is_not_remembered():
    """A prompt or a thought without a full block of its own."""
    evidence = HistoryEvidence()
    for num_kept in (0, len(TURN), len(TURN) + 1):
        evidence.finished(TURN, num_kept)
    assert evidence.of_prompt([*TURN, "u2"]) is None


def test_requests_of_which_nothing_is_known_follow_a_quarter_of_the_others():
    """The family's rule, until a prompt kept its thoughts; and again when they stop."""
    evidence = HistoryEvidence()
    evidence.finished(TURN, 2)
    dropped, kept = ["p1", "p2", "a1'"], TURN
    assert not evidence.keeps
    evidence.of_prompt(dropped)
    assert not evidence.keeps
    evidence.of_prompt(kept)
    assert evidence.keeps
    for _ in range(200):
        evidence.of_prompt(dropped)
    assert not evidence.keeps
    for number in range(200):
        evidence.of_prompt(dropped if number % 3 else kept)
    assert evidence.keeps


def test_the_oldest_turns_are_forgotten(monkeypatch):
    """As many as fit are remembered; one that finishes again is new."""
    monkeypatch.setattr(history_evidence, "_MOST_TURNS", 2)
    evidence = HistoryEvidence()
    for name in ("a", "b", "a", "c"):
        evidence.finished([name, f"{name} thinks"], 1)
    assert evidence.of_prompt(["b", "b thinks"]) is None
    assert evidence.of_prompt(["a", "a thinks"]) is True
    assert evidence.of_prompt(["c", "else"]) is False
