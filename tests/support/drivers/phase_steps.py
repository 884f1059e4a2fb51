"""Plays the tokens of one request through phase tracker and progress, as the engine's steps do."""

from meridian_patch.phase.progress import PhaseChange, PhaseProgress
from meridian_patch.phase.tracker import PhaseTracker


def play(boundaries, prompt, output, rng):
    """The progress after steps of one to four tokens, and reasoning tokens by output tokens."""
    tracker, progress, counts = PhaseTracker(boundaries), PhaseProgress(), {}
    known = list(prompt)
    tracker.add("r", known)
    while len(known) < len(prompt) + len(output):
        done = len(known) - len(prompt)
        step = output[done : done + rng.randint(1, 4)]
        tracker.runs("r")
        expected = tracker.expects([step], {"r": 0})
        known += step
        change = None
        if "r" in expected and tracker.observe("r", expected["r"]):
            change = PhaseChange.of(tracker.get("r"))
        progress.take(change, len(step))
        counts[progress.num_tokens] = progress.reasoning_tokens(progress.num_tokens)
    return progress, counts
