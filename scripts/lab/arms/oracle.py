"""Oracles: they know how long each request will think and answer. Bounds, not opponents.

Source: SRPT, Schrage 1968; by KV volume, as in the queueing analyses of serving under a KV bound
(arXiv 2605.04595). Deviations: a preempted request computes its tokens again, so that preempting
whenever another is shorter is no longer optimal for the mean. The lengths come from the trace.
"""

from typing import Any

from arms.base import Arm, Rank


class _Oracle(Arm):
    answers_first = True
    cut_factor = 1.17
    displaces = True


class OracleSrpt(_Oracle):
    """Shortest remaining thought first; answers first, and the step cut.

    Attributes:
        counts_answer: the rest of the answer counts, too.
    """

    counts_answer: bool = False

    def rank(self, request: Any) -> Rank:
        lengths = self.facts.lengths[request.request_id]
        total = lengths.think + (lengths.answer if self.counts_answer else 0)
        return total - request.num_output_tokens, request.arrival_time


class OracleVolume(_Oracle):
    """Least remaining KV volume first: tokens held, summed over the steps that are left."""

    def rank(self, request: Any) -> Rank:
        lengths = self.facts.lengths[request.request_id]
        rest = lengths.think + lengths.answer - request.num_output_tokens
        return rest * request.num_tokens + rest * rest / 2, request.arrival_time
