"""Answers calibration's requests with a real engine of this process."""

import json
from typing import TYPE_CHECKING, Any, TextIO

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from meridian_patch.calibrate.sampled_entropies import SampledEntropies
from meridian_patch.engine.early_exit.engine_lag import pace_of
from meridian_patch.engine.in_process import core_of

if TYPE_CHECKING:
    import queue

# Behind the last line.
END = ""


class CalibrationEngine:
    """One engine and what is asked of it.

    Args:
        job: ``engine`` and ``sampling``, see ``calibration_run``.
        channel: takes the replies.
    """

    def __init__(self, job: dict[str, Any], channel: TextIO) -> None:
        self._channel = channel
        self._llm = LLM(**job["engine"])
        self._engine = self._llm.llm_engine
        # As a server has it: what the model's generation_config.json says, where nothing is asked.
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

    def serve(self, lines: "queue.Queue[str]") -> None:
        """Answer requests until their end."""
        is_open = True
        while is_open or self._engine.has_unfinished_requests():
            # Without work there is nothing to do but wait for a line.
            while is_open and (not self._engine.has_unfinished_requests() or not lines.empty()):
                line = lines.get()
                is_open = line != END
                if is_open:
                    self._add(json.loads(line))
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

    def _send(self, reply: dict[str, Any]) -> None:
        self._channel.write(json.dumps(reply) + "\n")
        self._channel.flush()
