"""The arms by name, and the settings that are searched for each."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arms.andes import Andes
from arms.answers_first import AnswersFirst
from arms.base import Arm
from arms.fcfs import FcfsTuned, SarathiStatic
from arms.ltr import Ltr, LtrAnswers
from arms.mlfq import Mlfq, MlfqAnswers
from arms.oracle import OracleSrpt, OracleVolume
from arms.pascal import Pascal, PascalProtected
from arms.qoserve import QoServe
from arms.vtc import Vtc


@dataclass(frozen=True)
class Entry:
    """One arm.

    Attributes:
        label: as in tables and pictures.
        mixin: its class.
        is_oracle: it knows the lengths, so it is a bound and no opponent.
        settings: the setting that the search found; others are the class's.
        grid: what was searched: settings one by one, the others at ``settings``.
    """

    label: str
    mixin: type[Arm]
    is_oracle: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)


_CUT = {"cut_factor": (1.1, 1.17, 1.25)}
_AGING = {"aging_s": (10.0, 30.0, 90.0)}
# Settings: seed 301, 300 requests of s-prod at rho 1.1 with the short pool, by the ok share where
# the p99 of the slowdown is not over a tenth worse. A first search: `ltr`, `vtc`, `pascal` and the
# oracles were not in it.
ARMS: Mapping[str, Entry] = {
    "fcfs-tuned": Entry(
        "FCFS tuned",
        FcfsTuned,
        settings={"budget": 4096},
        grid={"budget": (1024, 2048, 4096), "threshold": (0, 512)},
    ),
    "sarathi": Entry(
        "Sarathi, static",
        SarathiStatic,
        settings={"chunk": 256},
        grid={"chunk": (256, 384, 512, 1024)},
    ),
    "answers-first": Entry("answers first + cut", AnswersFirst, grid=_CUT),
    "mlfq": Entry(
        "MLFQ",
        Mlfq,
        settings={"aging_s": 90.0},
        grid={"first_level": (64, 512), "counts_prompt": (True, False)} | _AGING,
    ),
    "mlfq-answers": Entry(
        "MLFQ + answers + cut", MlfqAnswers, grid={"first_level": (256, 512)} | _CUT | _AGING
    ),
    "pascal": Entry(
        "PASCAL", Pascal, grid={"quantum": (250, 500), "demoted_tokens": (2_000, 5_000)}
    ),
    "pascal-answers": Entry(
        "PASCAL, answers protected + cut",
        PascalProtected,
        settings={"demoted_tokens": 2_000},
        grid={"quantum": (250, 500), "demoted_tokens": (2_000, 5_000)} | _CUT,
    ),
    "ltr": Entry("LTR", Ltr, grid=_AGING),
    "ltr-answers": Entry("LTR + answers + cut", LtrAnswers, grid=_AGING | _CUT),
    "vtc": Entry("VTC", Vtc, grid={"output_weight": (1, 2)}),
    "andes": Entry(
        "Andes",
        Andes,
        settings={"pinned_tokens": 4_000},
        grid={"first_token_s": (1.0, 10.0), "pinned_tokens": (500, 4_000)},
    ),
    "qoserve": Entry(
        "QoServe",
        QoServe,
        settings={"itl_s": 0.03},
        grid={"itl_s": (0.015, 0.03), "alpha_s": (0.0, 0.001, 0.01)},
    ),
    "srpt": Entry("oracle SRPT + cut", OracleSrpt, is_oracle=True, grid=_CUT),
    "volume": Entry("oracle by KV volume + cut", OracleVolume, is_oracle=True, grid=_CUT),
}


def sources(mixin: type[Arm]) -> list[Path]:
    """The files of this folder that an arm's decisions depend on."""
    own = {Path(inspect.getfile(base)) for base in mixin.__mro__ if issubclass(base, Arm)}
    shared = Path(__file__).parent
    return sorted({*own, shared / "base.py", shared / "step_cut.py", shared / "facts.py"})
