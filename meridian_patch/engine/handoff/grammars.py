"""Grammars of answers that began at another engine."""

from concurrent.futures import Future
from typing import Any


def binds_thoughts(vllm_config: Any) -> bool:
    """Whether grammars begin with the thought, as without a reasoning parser."""
    config = vllm_config.structured_outputs_config
    return not config.reasoning_parser or config.enable_in_reasoning


def go_on_in_answer(request: Any, num_tokens: int) -> None:
    """Let a request's grammar go on behind the answer tokens at the end of its prompt.

    Args:
        request: the scheduler's, whose grammar may still be compiled.
        num_tokens: of the answer.
    """
    wanted = request.structured_output_request
    if wanted is None or num_tokens < 1:
        return
    ids = list(request.prompt_token_ids[-num_tokens:])
    # Load-bearing: the grammar, or the future of one; vLLM's scheduler waits until it is there.
    compiled = wanted._grammar
    if not isinstance(compiled, Future):
        _accept(compiled, request.request_id, ids)
        return
    advanced: Future[Any] = Future()
    wanted._grammar = advanced

    def advance(done: Future[Any]) -> None:
        try:
            advanced.set_result(_accept(done.result(), request.request_id, ids))
        except Exception as error:
            advanced.set_exception(error)

    compiled.add_done_callback(advance)


def _accept(grammar: Any, name: str, ids: list[int]) -> Any:
    if grammar is not None and not grammar.accept_tokens(name, ids):
        raise ValueError(f"the answer of request {name} so far is not in its grammar")
    return grammar
