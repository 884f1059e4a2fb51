"""Answers calibration's requests with a real engine, in a process of its own.

    python -P -m meridian_patch.calibrate.engine_main

Reads JSON lines from standard input and writes JSON lines to standard output; what vLLM prints
goes to standard error.

1. The first line holds ``engine``, arguments of ``vllm.LLM``, and ``sampling``, fields of
   ``SamplingParams`` that stand in for the model's own. Its reply holds ``max_num_seqs``
   and ``pace``, the fields of ``Lag`` that are the engine's.
2. Each further line is a request: ``key``, ``prompt`` (token ids), ``max_tokens`` (None: as many as
   there is room for) and ``is_measured``. Its reply holds ``key``, ``ids`` (None: the prompt leaves
   no room for a token) and ``entropies`` (nats, by token; None: not measured). Replies come as
   requests finish.

The process ends when its input does.
"""

import json
import os
import queue
import sys
import threading


def main() -> None:
    """Start the engine, answer, end with the input."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Late: vLLM may print as soon as it is imported.
    from meridian_patch.calibrate.engine import END, CalibrationEngine

    engine = CalibrationEngine(json.loads(sys.stdin.readline()), channel)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(END)

    threading.Thread(target=read, daemon=True).start()
    engine.serve(lines)


if __name__ == "__main__":
    main()
