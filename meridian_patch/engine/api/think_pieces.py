"""Streams thoughts in larger pieces than answers."""

from typing import Any, Final

from meridian_patch import envs
from meridian_patch.config.load import load_config
from meridian_patch.config.schema import Config
from meridian_patch.phase.progress import THINK

# Behind a router each piece costs the time of three processes and the client.
_OF_ROLE_THINK: Final = 8


def with_think_pieces(original: type) -> type:
    """``original``, a request state with ``progress``, whose thoughts come in larger pieces.

    A piece of a thought waits until it has ``responses.think_stream_interval`` tokens. The first
    one never waits, and the step that ends a thought sends what is left of it.

    Raises:
        ConfigError: the configuration is wrong.
    """
    think_interval = _think_interval(load_config(envs.environment()).config)
    if think_interval == 1:
        return original

    class PiecedRequestState(original):
        # Load-bearing: tokens in one piece, which vLLM reads at each output.
        stream_interval: int

        def make_request_output(self, *args: Any, **kwargs: Any) -> Any:
            own = self.stream_interval
            self.stream_interval = self._interval(own)
            try:
                output = super().make_request_output(*args, **kwargs)
                if output is not None and self.stream_interval == 1:
                    # Upstream counts what it has sent for larger intervals only.
                    self.sent_tokens_offset = self.detokenizer.num_output_tokens()
                return output
            finally:
                self.stream_interval = own

        def _interval(self, own: int) -> int:
            if self.detokenizer is None:
                return own
            if self.progress.place == THINK:
                return max(own, think_interval)
            # Load-bearing: with an interval of 1, upstream sends the newest tokens alone.
            num_unsent = self.detokenizer.num_output_tokens() - self.sent_tokens_offset
            return max(own, 2) if num_unsent > 1 else own

    return PiecedRequestState


def _think_interval(config: Config) -> int:
    default = _OF_ROLE_THINK if config.handoff.role == "think" else 1
    return config.responses.think_stream_interval or default
