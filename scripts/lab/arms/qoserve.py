"""QoServe: the largest chunk that the tightest decode allows, prompts by deadline and size.

Source: QoServe/Niyama (ASPLOS'26, arXiv 2503.22562). Decodes first; the step's chunk is the largest
of a few whose predicted time, with a margin, is within the least slack of all decodes; prompts are
ordered by deadline plus a weight on the work that is left, those that missed theirs behind.
Deviations: one class of requests; the step times are known; a resumed request counts as a prompt.
"""

from typing import Any

from arms.base import Arm, Rank
from arms.step_cut import decode_seconds, tokens_within

CHUNKS = (128, 256, 512, 1024, 2048, 2552)


class QoServe(Arm):
    """Phase-blind, without preemptions of its own.

    Attributes:
        ttft_s: seconds from arrival to a prompt's deadline.
        itl_s: the pace of every request, seconds per token.
        alpha_s: seconds that a token of work left weighs against the deadline.
        margin: the predicted time of a step is taken so many times.
    """

    ttft_s: float = 6.0
    itl_s: float = 0.015
    alpha_s: float = 0.001
    margin: float = 1.2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s: dict[str, float] = {}
        # When the next token of a decoding request is due.
        self._due_s: dict[str, float] = {}

    def added(self, request: Any) -> None:
        self._deadline_s[request.request_id] = self.clock() + self.ttft_s

    def ran(self, request: Any, num_tokens: int) -> None:
        name, now_s = request.request_id, self.clock()
        # A reader that waited once does not catch up.
        self._due_s[name] = max(self._due_s.get(name, now_s), now_s) + self.itl_s * num_tokens

    def left(self, request: Any) -> None:
        del self._deadline_s[request.request_id]
        self._due_s.pop(request.request_id, None)

    def rank(self, request: Any) -> Rank:
        deadline_s = self._deadline_s[request.request_id]
        rest = request.num_tokens - request.num_computed_tokens
        # A preempted request has shown its first token: nothing is missed for good.
        is_relegated = deadline_s < self.clock() and not request.num_output_tokens
        return is_relegated, deadline_s + self.alpha_s * rest

    def before_step(self) -> None:
        if not self.current_step % 8:
            self.reorder()
        # Decodes in vLLM's order, then the prompts by rank.
        self.running.sort(key=lambda one: (1, *self.rank(one)) if one.is_prefill_chunk else (0,))

    def token_budget(self) -> int | None:
        decodes = [one for one in self.running if not one.is_prefill_chunk]
        if not decodes or not self.has_prefill():
            return None
        now_s = self.clock()
        slack_s = min(self._due_s.get(one.request_id, now_s) for one in decodes) - now_s
        context = sum([one.num_computed_tokens for one in decodes])
        least_s = decode_seconds(self.facts, len(decodes), context)
        room = tokens_within(self.facts, self.running, max(slack_s, least_s) / self.margin)
        fitting = [chunk for chunk in CHUNKS if chunk <= room]
        return max([len(decodes) + 16, *fitting[-1:]])
