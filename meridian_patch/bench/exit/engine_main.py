"""Answers the requests of ``meridian bench exit`` with a real engine, in a process of its own.

    python -P -m meridian_patch.bench.exit.engine_main

Reads JSON lines from standard input and writes JSON lines to standard output; what vLLM prints
goes to standard error.

1. The first line holds ``engine``, arguments of ``vllm.LLM``; ``reasoning``, start and end marker
   for vLLM's own thinking budget (None: it is not used); and ``concurrency``, the most requests
   at a time. Its reply says that the engine is ready.
2. Each further line is an arm, ``requests``: for each ``key``, ``prompt`` (token ids) and
   ``params`` (of ``SamplingParams``). As requests finish, a reply holds ``key``, ``ids``,
   ``finish_reason``, ``told`` (what the caller is told of the thought) and ``forced`` (output
   indices that a mask of ours decided).
   The last reply of an arm holds ``totals``, by event.

The process ends when its input does.
"""

import json
import os
import sys


def main() -> None:
    """Start the engine, answer, end with the input."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Late: vLLM may print as soon as it is imported.
    from meridian_patch.bench.exit.patched_engine import ExitEngine

    engine = ExitEngine(json.loads(sys.stdin.readline()), channel)
    for line in sys.stdin:
        engine.run(json.loads(line)["requests"])


if __name__ == "__main__":
    main()
