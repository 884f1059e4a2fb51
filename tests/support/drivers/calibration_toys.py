"""A toy model for calibration's tests: it thinks in lines, and knows the answer after some of them.

Token ids below 256 are characters; the prompt is the number of the line after which it knows.
"""

import math

from meridian_patch.calibrate.engine_process import Reply
from meridian_patch.calibrate.graders import make_grader
from meridian_patch.calibrate.observe import Observer, Subject
from meridian_patch.calibrate.problems import Problem
from meridian_patch.calibrate.thresholds import EAT
from meridian_patch.config.schema import ExitConfig
from meridian_patch.exit.text_breaks import Breaks
from meridian_patch.phase.boundaries import Boundaries

START, END = 256, 257
LINE = ord("\n")
LINES = 10
WIDTH = 5
BREAKS = Breaks(*(frozenset({LINE}),) * 4)
BOUNDARIES = Boundaries("toy", ((START,),), ((END,),), (END,), probe=(END,))
CONFIG = ExitConfig(
    min_think_tokens=0,
    eat_warmup_probes=1,
    eat_alpha=0.9,
    eat_max_entropy_nats=None,
    probe_min_gap_tokens=1,
    probe_max_gap_tokens=WIDTH,
)


def toy_subject(thresholds=None, **changes):
    return Subject(
        **{
            "boundaries": BOUNDARIES,
            "breaks": BREAKS,
            "config": CONFIG,
            "thresholds": thresholds or {EAT: EAT.thresholds},
            "max_tokens": None,
            "max_answer_tokens": 4,
            "decode": lambda ids: "".join(map(chr, ids)),
        }
        | changes
    )


def toy_prompts(known_after, answer="7"):
    """Problems that are known after so many lines, with their prompts."""
    return [
        (Problem(str(index), (), answer, index + 1), [known, START])
        for index, known in enumerate(known_after)
    ]


class ToyEngine:
    """Answers as the toy model does.

    Args:
        die_after: KeyboardInterrupt once that many replies were given.
        natural_answer: what it says after the whole thought.
    """

    def __init__(self, die_after=math.inf, natural_answer="7"):
        self.asked = []
        self._die_after = die_after
        self._natural_answer = natural_answer

    def run(self, requests):
        for request in requests:
            if len(self.asked) >= self._die_after:
                raise KeyboardInterrupt
            self.asked.append(request.key)
            yield request.key, self._reply(request)

    def pace(self):
        self.asked_pace = True
        return {"batches_in_flight": 1, "stride_steps": 1, "block_tokens": 1000}

    def _reply(self, request):
        if request.prompt[-1] == START:
            thought = ([ord("x")] * (WIDTH - 1) + [LINE]) * LINES
            ids = [*thought, END, *map(ord, self._natural_answer)]
            return Reply(ids, [1.0] * len(ids) if request.is_measured else None)
        lines = request.prompt.count(LINE)
        knows = lines >= request.prompt[0]
        # It is less and less unsure, and then sure.
        entropy = 0.0 if knows else 2.0 + (lines % 2)
        return Reply([ord("7" if knows else "0")], [entropy] if request.is_measured else None)


def toy_observer(journal, engine, subject=None):
    seen = []
    observer = Observer(
        subject or toy_subject(),
        make_grader("exact"),
        engine,
        journal,
        lambda *progress: seen.append(progress),
    )
    return observer, seen
