"""Where calibration gets the entropy of each sampled token from."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

# Above this the whole vocabulary's logprobs of a long thought are too many to carry.
MAX_MEASURED_VOCABULARY = 8192
# A distribution that is whole sums to 1, but for rounding in float32.
_MASS_TOLERANCE = 1e-3


class TokenEntropies(Protocol):
    """Entropy (nats) of the raw logits that each token of a request was sampled from."""

    @property
    def engine_arguments(self) -> Mapping[str, Any]:
        """Of ``vllm.LLM``, without which there are no entropies."""
        ...

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Fields of ``SamplingParams`` of a request whose tokens are to be measured."""
        ...

    def read(self, completion: Any) -> list[float]:
        """One entropy per token of a finished ``CompletionOutput``; NaN where there is none."""
        ...


class LogprobEntropies:
    """From the whole vocabulary's log probabilities, which stock vLLM returns.

    Costs one number per token and vocabulary entry: for a single token of each probe that is
    bearable with any vocabulary, for every token of a thought only with a small one.
    """

    # Load-bearing: raw_logprobs are of the logits before temperature, penalties and masks.
    engine_arguments: Mapping[str, Any] = {"max_logprobs": -1, "logprobs_mode": "raw_logprobs"}
    sampling: Mapping[str, Any] = {"logprobs": -1, "flat_logprobs": True}

    def read(self, completion: Any) -> list[float]:
        """See ``TokenEntropies``."""
        flat = completion.logprobs
        # Load-bearing: FlatLogprobs holds all positions one behind the other, in two lists of
        # where each begins and ends.
        ids, logprobs = np.array(flat.token_ids), np.array(flat.logprobs, np.float64)
        spans = zip(flat.start_indices, flat.end_indices, strict=True)
        return [_entropy(ids[begin:end], logprobs[begin:end]) for begin, end in spans]


def _entropy(ids: Any, logprobs: Any) -> float:
    # Load-bearing: the sampled token stands first, and again at its rank.
    _, first = np.unique(ids, return_index=True)
    each = logprobs[first]
    shares = np.exp(each)
    if not abs(float(shares.sum()) - 1) < _MASS_TOLERANCE:
        return float("nan")
    return float(-(shares * np.where(shares > 0, each, 0.0)).sum())
