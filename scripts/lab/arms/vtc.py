"""VTC: a counter of service per client, the client with the least is admitted first.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI'24, arXiv 2401.00588). A
client that comes back from an empty queue starts at the least counter of those that wait; a prompt
counts on admission, output tokens count twice as they come; the first request that does not fit
ends the admissions. Deviations: the traces name no clients, so requests are spread over ``clients``
by their ids, and sessions by their names; a resumed request's prompt is not counted again.
"""

import zlib
from typing import Any

from arms.base import Arm, Rank

_REORDER_STEPS = 8


class Vtc(Arm):
    """Phase-blind, without preemptions of its own.

    Attributes:
        clients: how many share the engine.
        output_weight: of an output token, over a prompt token's.
    """

    clients: int = 16
    output_weight: int = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.service = dict.fromkeys(range(self.clients), 0.0)
        self._client: dict[str, int] = {}
        self._uncounted: set[str] = set()

    def rank(self, request: Any) -> Rank:
        return self.service[self._client[request.request_id]], request.arrival_time

    def added(self, request: Any) -> None:
        # "SEED-SESSION-TURN" or "SEED-REQUEST": what stands before the turn.
        client = zlib.crc32("-".join(request.request_id.split("-")[:2]).encode()) % self.clients
        waiting = {self._client[one.request_id] for one in self.waiting if one is not request}
        if client not in waiting and waiting:
            least = min(self.service[other] for other in waiting)
            self.service[client] = max(self.service[client], least)
        self._client[request.request_id] = client
        self._uncounted.add(request.request_id)

    def before_step(self) -> None:
        if not self.current_step % _REORDER_STEPS:
            self.reorder()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if new.req_id in self._uncounted:
                self._uncounted.discard(new.req_id)
                self.service[self._client[new.req_id]] += len(new.prompt_token_ids)
                self.reorder()
        return output

    def ran(self, request: Any, num_tokens: int) -> None:
        self.service[self._client[request.request_id]] += self.output_weight * num_tokens

    def left(self, request: Any) -> None:
        del self._client[request.request_id]
        self._uncounted.discard(request.request_id)
