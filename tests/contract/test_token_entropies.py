"""Entropies are read from what vLLM returns when the whole vocabulary's logprobs are asked for."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
from vllm.sampling_params import SamplingParams

from meridian_patch.engine.token_entropies import LogprobEntropies

VOCABULARY = 50


def returned(rows, sampled):
    """As vLLM's output processor puts rows of log probabilities together: sampled, then by rank."""
    flat = FlatLogprobs()
    for row, token_id in zip(rows, sampled, strict=True):
        ranked = np.argsort(-row)
        ids = [token_id, *map(int, ranked)]
        values = [float(row[index]) for index in ids]
        append_logprobs_for_next_position(flat, ids, values, itertools.repeat(None), 1, VOCABULARY)
    return SimpleNamespace(logprobs=flat)


def test_entropies_are_those_of_the_rows():
    """One per token, in nats; the sampled token, which comes twice, counts once."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (6, VOCABULARY))
    logits[2, 7:] = -np.inf
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    shares = np.exp(rows)
    expected = -np.sum(shares * np.where(shares > 0, rows, 0), axis=1)
    found = LogprobEntropies().read(returned(rows, [0, 5, 3, 49, 1, 2]))
    assert found == pytest.approx(list(expected), rel=1e-9)


def test_what_is_no_distribution_has_no_entropy():
    """NaN logits, and logprobs that are not all there."""
    rows = np.full((2, VOCABULARY), np.nan)
    rows[1] = np.log(0.5 / VOCABULARY)
    assert np.isnan(LogprobEntropies().read(returned(rows, [0, 1]))).all()


def test_vllm_knows_the_fields():
    """All of the vocabulary may be asked for."""
    params = SamplingParams(**LogprobEntropies.sampling)
    assert (params.logprobs, params.flat_logprobs) == (-1, True)
