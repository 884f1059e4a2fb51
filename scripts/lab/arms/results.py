"""The replays of a campaign in a file, a line each, so that an interrupted one goes on."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from arms.replays import Key, Line, digest, play
from meridian_patch.bench.simulated.run import Workers
from meridian_patch.errors import BenchError


class Results:
    """Lines by key; those made by other sources than today's are not used.

    Args:
        path: JSON lines, appended to.
        say: prints progress.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self._path = path
        self._say = say
        self.lines: dict[Key, Line] = {}
        if path.is_file():
            for text in path.read_text().splitlines():
                line = _read(text)
                if line.code == digest(line.key.arm):
                    self.lines[line.key] = line

    def complete(self, wanted: Iterable[Key], workers: Workers) -> None:
        """Play what is missing, in the order given, and append each line as it comes.

        Raises:
            BenchError: a replay failed.
        """
        # The digests are those of now: a file may be edited while replays run.
        missing = {key: (key, digest(key.arm)) for key in wanted if key not in self.lines}
        if not missing:
            return
        started_s = time.monotonic()
        for count, (key, line) in enumerate(workers.apply(play, missing), 1):
            if isinstance(line, str):
                raise BenchError(f"{key}: {line}")
            self.lines[key] = line
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
            each_s = (time.monotonic() - started_s) / count
            left = (len(missing) - count) * each_s / 60
            setting = " ".join(f"{name}={value}" for name, value in key.settings)
            self._say(
                f"[{count}/{len(missing)}] {key.workload} {key.rate:.3g}/s seed {key.seed}"
                f" {key.arm} {setting}: {line.wall_s:.0f} s, ok {line.figures['ok_share']:.2f};"
                f" about {left:.0f} min left"
            )


def _read(text: str) -> Line:
    raw = json.loads(text)
    *names, settings = raw.pop("key")
    key = Key(*names, tuple((name, value) for name, value in settings))
    return Line(key, **raw)
