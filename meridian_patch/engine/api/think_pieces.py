"""Streams thoughts in larger pieces than answers."""

from functools import cache
from typing import Any, Final

from vllm.logger import init_logger
from vllm.reasoning import ReasoningParserManager

from meridian_patch.config.load import process_config
from meridian_patch.config.schema import Config
from meridian_patch.engine.api.served_model import served_by
from meridian_patch.phase.progress import THINK

logger = init_logger("vllm.meridian_patch")

# Each piece costs the time of the API server, of what stands before it, and of the client.
_OF_ROLE_THINK: Final = 8


def with_think_pieces(original: type) -> type:
    """``original``, a request state with ``progress``, whose thoughts come in larger pieces.

    A piece of a thought waits until it has ``responses.think_stream_interval`` tokens. The first
    one never waits, and the step that ends a thought sends what is left of it. Where the server's
    reasoning parser cannot take several tokens at once, each token is sent as it comes.

    Raises:
        ConfigError: the configuration is wrong.
    """
    think_interval = _think_interval(process_config().config)
    if think_interval == 1:
        return original

    class PiecedRequestState(original):
        # Load-bearing: tokens in one piece, which vLLM reads at each output.
        stream_interval: int

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.takes_pieces = False
            # Whether its last output was of a thought.
            self.was_thinking = False

        @classmethod
        def from_new_request(cls, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            state = super().from_new_request(tokenizer, *args, **kwargs)
            served = served_by(tokenizer)
            name = None if served is None else served.reasoning_parser
            state.takes_pieces = state.detokenizer is not None and _takes_pieces(name)
            return state

        def make_request_output(self, new_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.takes_pieces:
                return super().make_request_output(new_token_ids, *args, **kwargs)
            own = self.stream_interval
            self.stream_interval = self._interval(own, len(new_token_ids))
            try:
                output = super().make_request_output(new_token_ids, *args, **kwargs)
                if output is not None and self.stream_interval == 1:
                    # Upstream counts what it has sent for larger intervals only.
                    self.sent_tokens_offset = self.detokenizer.num_output_tokens()
                return output
            finally:
                self.stream_interval = own

        def _interval(self, own: int, num_new: int) -> int:
            is_thinking = self.progress.place == THINK
            # The step that begins a thought is sent as ever: parsers look for its marker alone.
            is_within, self.was_thinking = is_thinking and self.was_thinking, is_thinking
            if is_within:
                return max(own, think_interval)
            # Load-bearing: with an interval of 1, upstream sends the newest tokens alone.
            num_unsent = self.detokenizer.num_output_tokens() - self.sent_tokens_offset
            return max(own, 2) if num_unsent > num_new else own

    return PiecedRequestState


@cache
def _takes_pieces(parser: str | None) -> bool:
    """Whether a reasoning parser can take several tokens at once, the end of a thought among them.

    Upstream's older parsers look for the marker's text in each piece: some lose what stands before
    it, and some refuse a piece of two tokens.

    Args:
        parser: its name; None or empty: the server has none.
    """
    if not parser:
        return True
    try:
        found = ReasoningParserManager.get_reasoning_parser(parser)
    except (ImportError, KeyError):
        found = None
    # Load-bearing: true for parsers on upstream's engine, which goes through tokens one by one.
    if getattr(found, "engine_based_streaming", False):
        return True
    logger.warning(
        "meridian_patch: responses.think_stream_interval has no effect: reasoning parser %r takes "
        "one token at a time",
        parser,
    )
    return False


def _think_interval(config: Config) -> int:
    default = _OF_ROLE_THINK if config.handoff.role == "think" else 1
    return config.responses.think_stream_interval or default
