"""Answers JSON lines with a vLLM engine, in a process of its own.

    python -P -m meridian_patch.bench.engine_main MODULE:CLASS

The class is built with the job, which is the first line of standard input, and with a function
that sends a reply as a line of standard output. Its ``serve`` is called with a queue that takes
each further line, and None when there is none left; the process ends when it returns. What vLLM
prints goes to standard error.
"""

import importlib
import json
import os
import queue
import sys
import threading
from typing import Any


def main() -> None:
    """Build the class that the command line names, and let it serve."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = sys.argv[1].partition(":")
    # Late: vLLM may print as soon as it is imported.
    engine_class = getattr(importlib.import_module(module), name)

    def send(reply: dict[str, Any]) -> None:
        channel.write(json.dumps(reply) + "\n")
        channel.flush()

    engine = engine_class(json.loads(sys.stdin.readline()), send)
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    engine.serve(lines)


if __name__ == "__main__":
    main()
