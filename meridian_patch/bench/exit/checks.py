"""Finds replies that break a rule which every closed thought must keep."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# What the tiny reasoner answers.
ANSWER = re.compile(r"\s*\d(\nFrom [^\n]* we get \w=\d\.)?")
# A step that is worked out, as in a thought: "q=p+5=7+5=2".
STEP_LINE = re.compile(r"\w=\w[+*-]\d=\d")
_SHOWN_CHARACTERS = 160


class ThinkTokens(NamedTuple):
    """Ids that begin and end a thought."""

    start: int
    end: int


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes:
        arm: of the run.
        key: the request's question.
        rule: which one.
        shown: the answer, or the tokens in question.
        is_ours: we closed that thought. Models break these rules by themselves too: seldom, at
            temperature 1.
    """

    arm: str
    key: str
    rule: str
    shown: str
    is_ours: bool


def find_violations(
    arm: str,
    key: str,
    ids: Sequence[int],
    forced: Sequence[int],
    answer: str | None,
    markers: ThinkTokens,
    *,
    is_cut: bool,
) -> list[Violation]:
    """Broken rules of one reply.

    1. At most one boundary, and no new thought.
    2. Behind it no step is worked out, and the answer has its form; one that was cut by
       ``max_tokens`` need only be free of steps.
    3. No token behind the boundary was forced.

    Args:
        arm: of the run.
        key: the request's question.
        ids: output tokens.
        forced: output indices of forced ones.
        answer: text behind the boundary; None when the thought did not end.
        markers: of the model.
        is_cut: the output was ended by ``max_tokens``.
    """
    found = []
    ends = [index for index, token_id in enumerate(ids) if token_id == markers.end]
    if len(ends) > 1 or markers.start in ids:
        found.append(("second boundary", f"ends at {ends} of {len(ids)} tokens"))
    if ends and any(index > ends[0] for index in forced):
        found.append(("forced behind the boundary", f"{list(forced)}, boundary at {ends[0]}"))
    if answer is not None and STEP_LINE.search(answer.partition("From ")[0]):
        found.append(("reasoning in the answer", answer[:_SHOWN_CHARACTERS]))
    elif answer is not None and not is_cut and not ANSWER.fullmatch(answer):
        found.append(("answer of another form", answer[:_SHOWN_CHARACTERS]))
    return [Violation(arm, key, rule, shown, bool(forced)) for rule, shown in found]
