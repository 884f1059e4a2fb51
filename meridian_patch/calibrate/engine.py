"""Answers calibration's requests with a stock engine; see ``meridian_patch.bench.engine_main``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from meridian_patch.calibrate.sampled_entropies import SampledEntropies
from meridian_patch.engine.early_exit.close_checks import pace_of
from meridian_patch.replay.in_process import core_of

if TYPE_CHECKING:
    import queue


class CalibrationEngine:
    """One engine; its replies come as requests finish.

    A request holds ``key``, ``prompt`` (token ids), ``max_tokens`` (None: as many as there is room
    for) and ``is_measured``. Its reply holds ``key``, ``ids`` (None: the prompt leaves no room for
    a token) and ``entropies`` (nats, by token; None: not measured).

    Args:
        job: ``engine``, arguments of ``vllm.LLM``, and ``sampling``, fields of ``SamplingParams``
            in place of the model's own.
        send: takes the replies; the first one holds ``max_num_seqs`` and ``pace``, the fields of
            ``Lag`` that are the engine's.
    """

    def __init__(self, job: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._llm = LLM(**job["engine"])
        self._engine = self._llm.llm_engine
        # As on a server, the model's generation_config.json holds where nothing is given.
        self._sampling = self._llm.model_config.get_diff_sampling_param() | job["sampling"]
        self._entropies = SampledEntropies(self._llm)
        config = self._engine.vllm_config
        self._max_model_len = config.model_config.max_model_len
        self._send(
            {
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "pace": pace_of(core_of(self._llm).scheduler),
            }
        )

    def serve(self, requests: "queue.Queue[dict[str, Any] | None]") -> None:
        """Answer requests until None comes."""
        is_open = True
        while is_open or self._engine.has_unfinished_requests():
            # Waits for a request only where the engine has none.
            while is_open and (not self._engine.has_unfinished_requests() or not requests.empty()):
                request = requests.get()
                is_open = request is not None
                if request is not None:
                    self._add(request)
            if self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        self._finish(output)

    def _add(self, request: dict[str, Any]) -> None:
        room = self._max_model_len - len(request["prompt"])
        if room < 1:
            self._send({"key": request["key"], "ids": None, "entropies": None})
            return
        changes = {
            "max_tokens": min(request["max_tokens"] or room, room),
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        if request["is_measured"]:
            self._entropies.measure(request["key"])
        self._engine.add_request(
            request["key"],
            {"prompt_token_ids": request["prompt"]},
            SamplingParams(**(self._sampling | changes)),
        )

    def _finish(self, output: Any) -> None:
        ids = list(output.outputs[0].token_ids)
        entropies = self._entropies.take(output.request_id, len(ids))
        self._send({"key": output.request_id, "ids": ids, "entropies": entropies})
