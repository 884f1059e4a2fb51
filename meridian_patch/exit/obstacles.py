"""Lists all reasons why a thought cannot be closed early."""

from enum import StrEnum
from typing import Final


class Obstacle(StrEnum):
    """One reason; callers and metrics see its value.

    The first nine apply to the whole engine and disable strategies. The next nine apply to a
    close: something applied after the plug-in's masks would undo it, or no answer would follow it.
    The last three apply to one thought.
    """

    NO_BOUNDARY = "no_boundary"
    EXTERNAL_LAUNCHER = "external_launcher"
    STOPPED = "stopped"
    NO_SIGNALS = "no_signals"
    PROBE_TEXT = "probe_text"
    NO_PREFIX_CACHE = "no_prefix_cache"
    KV_GROUPS = "kv_groups"
    KV_CONNECTOR = "kv_connector"
    STEP_TOKENS = "step_tokens"

    GRAMMAR = "grammar"
    ALLOWED_TOKENS = "allowed_tokens"
    BAD_WORDS = "bad_words"
    LOGIT_BIAS = "logit_bias"
    MIN_TOKENS = "min_tokens"
    LOGITS_PROCESSORS = "logits_processors"
    TRACE_REPLAY = "trace_replay"
    BUDGET = "budget"
    NO_ROOM = "no_room"

    FLOOR = "floor"
    WARM_UP = "warm_up"
    NOT_PROBED = "not_probed"


TO_CLOSES: Final = (
    Obstacle.GRAMMAR,
    Obstacle.ALLOWED_TOKENS,
    Obstacle.BAD_WORDS,
    Obstacle.LOGIT_BIAS,
    Obstacle.MIN_TOKENS,
    Obstacle.LOGITS_PROCESSORS,
    Obstacle.TRACE_REPLAY,
    Obstacle.BUDGET,
    Obstacle.NO_ROOM,
)
"""Obstacles that are found when a close is due."""

PASSING: Final = (Obstacle.GRAMMAR, Obstacle.MIN_TOKENS)
"""Obstacles to a close that may be gone at a later token of the same thought."""
