"""Why a thought that was to be closed early could not be: one closed vocabulary."""

from enum import StrEnum
from typing import Final


class Obstacle(StrEnum):
    """One reason; its text is what callers and metrics see.

    The first eight hold for the engine and stop strategies from judging. The next eight concern
    the close itself: something behind our masks would undo it. The last three concern one thought.
    """

    NO_BOUNDARY = "no_boundary"
    EXTERNAL_LAUNCHER = "external_launcher"
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
)
"""Those that are found when a close is due."""
