"""Probe requests, which the plug-in itself adds to the scheduler, and hides from clients."""

from collections.abc import Set as AbstractSet
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request


class ProbeRequest(Request):
    """A probe. Requests of this class are hidden from everything outside the engine core.

    Attributes:
        is_awaited: it was preempted while its sample was in flight, and is in no queue any more.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Load-bearing: model runner V2 receives both lists, and one list object is pickled once.
        # The one token that the probe samples is appended only after its last step.
        self.prompt_token_ids = self._all_token_ids
        self.is_awaited = False


def sampled_as(asked: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
    """Sampling parameters of a probe of so many tokens, from those of its parent.

    Load-bearing: one greedy request in a batch, or one with a seed, makes model runner V2 leave its
    fused sampler for a fallback that is compiled at first use. Penalties, biases, bad words,
    grammars and logprobs slow down the whole batch, so a probe has none. Its sampled token is
    dropped, and its entropy is that of the raw logits.
    """
    return SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        max_tokens=1,
        detokenize=False,
        # Load-bearing: vLLM returns routed experts from this prompt token on. Without it a probe
        # would ship those of its parent's whole prefix.
        routed_experts_prompt_start=num_prompt_tokens,
    )


def hide_end(scheduler: Any, request: ProbeRequest) -> None:
    """Remove a freed probe from the ended requests that are reported to clients."""
    # Load-bearing: ids of ended requests by client, until the next outputs; None if clients do not
    # receive them.
    ended = scheduler.finished_req_ids_dict
    if ended is None:
        return
    names = ended[request.client_index]
    names.discard(request.request_id)
    if not names:
        del ended[request.client_index]


def strip(outputs: dict[int, Any], names: AbstractSet[str]) -> None:
    """Remove probes from a step's ``EngineCoreOutputs`` (by client), in place."""
    for client, batch in list(outputs.items()):
        batch.outputs = [each for each in batch.outputs if each.request_id not in names]
        if not (batch.outputs or batch.finished_requests or batch.scheduler_stats):
            del outputs[client]
