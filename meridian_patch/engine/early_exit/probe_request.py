"""A request that is ours."""

from typing import Any

from vllm.v1.request import Request


class ProbeRequest(Request):
    """A probe; what is of this class is seen by nobody outside of the engine core."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Load-bearing: model runner V2 is sent both lists. A list that is one object is pickled
        # once. The one token that the probe samples is appended when its last step is over.
        self.prompt_token_ids = self._all_token_ids
