"""The class of probe requests, which the plug-in itself adds to the scheduler."""

from typing import Any

from vllm.v1.request import Request


class ProbeRequest(Request):
    """A probe. Requests of this class are hidden from everything outside the engine core."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Load-bearing: model runner V2 receives both lists, and one list object is pickled once.
        # The one token that the probe samples is appended only after its last step.
        self.prompt_token_ids = self._all_token_ids
