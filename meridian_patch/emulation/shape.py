"""Reads from a ``SchedulerOutput`` alone what the model has to do in its step.

A worker has no scheduler to ask: it may be in another process, and outputs are read when the
scheduler has long gone on.
"""

from typing import Any

from meridian_patch.replay.types import StepWork


class StepShapes:
    """Shapes of steps, in the order in which they are scheduled.

    A request's prefill is its prompt, and after a preemption all that it has to compute again. A
    request that computes several tokens beyond that checks drafts. One token alone is a decode,
    also where a prompt was found in the prefix cache but for its last token, as in a replay.
    """

    def __init__(self) -> None:
        # Tokens that each live request has to compute before it samples.
        self._prefills: dict[str, int] = {}

    def read(self, output: Any) -> StepWork:
        """The work of a step that was scheduled after all that were read before.

        Load-bearing: `num_computed_tokens` is from before the step. A request resumed on runner V1
        brings its tokens in `all_token_ids`, on V2 it comes as a new one with `prefill_token_ids`.
        """
        for name in output.finished_req_ids:
            self._prefills.pop(name, None)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids
            self._prefills[new.req_id] = new.prompt_len if tokens is None else len(tokens)
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in cached.resumed_req_ids:
            tokens = cached.all_token_ids.get(name)
            if tokens is not None:
                self._prefills[name] = len(tokens)
        prefill = prefill_seqs = drafts = context = attended = 0
        for name, tokens in output.num_scheduled_tokens.items():
            before = computed[name]
            after = before + tokens
            context += after
            attended += tokens * after - tokens * (tokens - 1) // 2
            if tokens > 1 and before < self._prefills.get(name, 0):
                prefill += tokens
                prefill_seqs += 1
            else:
                drafts += tokens - 1
        return StepWork(
            prefill_tokens=prefill,
            decode_seqs=len(output.num_scheduled_tokens) - prefill_seqs,
            context_tokens=context,
            attended_tokens=attended,
            prefill_seqs=prefill_seqs,
            draft_tokens=drafts,
        )
