"""Refuses wrong ``meridian_*`` fields of every request, in servers and in ``vllm.LLM``."""

from copy import copy
from typing import Any

from meridian_patch.config.load import process_config
from meridian_patch.engine.api.exit_summary import RequestRefused, check_fields
from meridian_patch.engine.api.served_model import ServedModel, register
from meridian_patch.errors import MeridianError


def build_input_processor(original: type) -> type:
    """``original`` with ``meridian_*`` fields checked before a request is processed."""

    class CheckedInputProcessor(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            served = ServedModel(self.vllm_config, process_config())
            self.served_model = served
            # Load-bearing: the engine builds its output processor with the same tokenizer.
            tokenizer = self.renderer.tokenizer
            if tokenizer is not None:
                register(tokenizer, served)
                if served.scope_of(None) == "answer":
                    # Now, so that a server that cannot do it does not start.
                    _ = served.matcher

        def process_inputs(
            self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # Load-bearing: upstream passes `vllm_xargs` as `extra_args`; pooling parameters have
            # none.
            extra_args = getattr(params, "extra_args", None)
            # Not the reserve: upstream has put a bound of its own in the place of the client's.
            fields = check_fields(extra_args, self.served_model)
            if fields is not extra_args:
                # The caller may use its own again.
                params = copy(params)
                params.extra_args = fields
            self._prepare_stops(params)
            return super().process_inputs(request_id, prompt, params, *args, **kwargs)

        def _prepare_stops(self, params: Any) -> None:
            """Resolve the boundaries that a request's stop strings need, or refuse the request."""
            if not getattr(params, "stop", None) or self.served_model.scope_of(params) == "all":
                return
            try:
                _ = self.served_model.matcher
            except MeridianError as error:
                raise RequestRefused(f"vllm_xargs field meridian_stop_scope: {error}") from error

    return CheckedInputProcessor
