"""Levels of attained service: who thinks longest waits for whom (multi-level feedback)."""


def level_of(think_tokens: int, first_tokens: int) -> int:
    """Level of a thinker; the lower goes first.

    Each level holds twice the think tokens of the one before it, so that few changes of level, and
    few preemptions, separate a short thought from the longest one.

    Args:
        think_tokens: think tokens so far.
        first_tokens: think tokens with which level 0 ends.
    """
    return (think_tokens // first_tokens).bit_length()
