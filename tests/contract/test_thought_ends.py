"""What ends a thought to a reasoning parser of vLLM ends it here: every parser and every family.

Each parser divides a text that holds a thought, a candidate for its end, and more text. Whether the
text behind the candidate is still reasoning is compared with the phase behind the same tokens here.
"""

from collections.abc import Iterable
from functools import cache
from typing import ClassVar

import pytest
from spoken import SpokenTracker
from tokenizers import AddedToken
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager

from meridian_patch.config.family_files import load_families
from meridian_patch.config.matching import FamilyMatch
from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.boundaries import vocabulary_of
from meridian_patch.engine.reasoning_parser import parser_strings
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.markers import ServerStrings, choose_markers
from meridian_patch.phase.resolve import resolve
from meridian_patch.phase.tracker import Phase

FAMILIES = {name: file.family for name, file in load_families().items()}
PARSERS = ReasoningParserManager.list_registered()
BY_FAMILY = [
    (name, parser)
    for name, family in FAMILIES.items()
    for parser in family.parsers
    if parser in PARSERS
]
FAMILY_OF = {parser: name for name, parser in reversed(BY_FAMILY)}
# They read a template that only their models' tokenizers have.
NEED_A_TEMPLATE = {"beam", "hf"}
# They give no markers: a family file knows their models, or these have a single phase.
WITHOUT_MARKERS = {
    "deepseek_v3",
    "granite",
    "hunyuan_a13b",
    "minimax_m2_append_think",
    "muse",
    "muse_glimmer",
    "musespark1x",
    "openai_gptoss",
    "poolside_v1",
}
# They divide nothing by themselves, only what streams through them, or only with the end marker.
DO_NOT_TELL = {"granite", "hunyuan_a13b", "olmo3", "openai_gptoss"}
# They give no markers to ask them with, or leave whole texts to another part of vLLM: any start
# marker opens a thought.
NOT_ASKED = WITHOUT_MARKERS | {"cohere_command3", "cohere_command4", "k2_horizon"}
# Tokens beside the markers without which a parser cannot be built.
NEEDED = {
    "olmo3": ["Ġ</", "</", "think", ">", "<", "Ġ<"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "poolside_v1": ["<assistant>"],
}
# They look for the start marker in the output, or count nothing. The templates of some never open
# the thought in the prompt.
UNCOUNTED = {
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "ernie45",
    "gemma4",
    "holo2",
    "hy_v3",
    "inkling",
    "k2_horizon",
    "minimax_m2_append_think",
    "minimax_m3",
    "mistral",
    "step5",
}
PLAIN = ["<think>", "</think>", "<tool_call>"]
THINKING = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
REQUEST = ChatCompletionRequest(messages=[], model="m")
THOUGHT, REST = "so it is", "and no more"


def candidates() -> list[str]:
    """Whatever ends a thought or opens a tool call in any family, and what ends nothing."""
    texts = {"<|im_end|>", "<tool_response>", "answer:"}
    for family in FAMILIES.values():
        texts.update((*family.implicit_end, *family.tool_call, *(end for _, end in family.pairs)))
    return sorted(texts)


@cache
def tokenizer_for(parser: str, name: str | None):
    """A token per byte, and one for each marker that is a vocabulary entry."""
    tokenizer = build_tokenizer()
    texts = [*NEEDED.get(parser, ())]
    family = FAMILIES.get(name or FAMILY_OF.get(parser, ""))
    if family is None:
        texts += PLAIN
    else:
        ids = family.documented_ids
        texts += [
            text
            for pair in family.pairs
            for text, known in zip(pair, (ids.start, ids.end), strict=True)
            if ids.is_single(known) in {True, None}
        ]
        texts += [*family.implicit_end, *family.tool_call]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in dict.fromkeys(texts)])
    return tokenizer


def strings_of(parser: str, name: str | None) -> ServerStrings:
    return parser_strings(parser, tokenizer_for(parser, name), "m")


def boundaries_for(parser: str, name: str | None, server: ServerStrings):
    """Ours; None if neither a family nor the parser knows the markers."""
    match = None
    if name is not None:
        match = FamilyMatch(name, FAMILIES[name], f"{name}.yaml", "parser", parser)
    markers = choose_markers("m", match, server)
    if markers is None:
        return None
    return resolve("m", markers, vocabulary_of(tokenizer_for(parser, name), "m")).boundaries


def ends_here(boundaries, tokenizer, start: str, text: str) -> bool:
    """Whether the phase behind ``text`` is the answer's, in a thought that the prompt opened."""
    tracker = SpokenTracker(boundaries)
    tracker.add("r", tokenizer.encode(start, add_special_tokens=False))
    tracker.say("r", tokenizer.encode(text, add_special_tokens=False))
    return tracker.get("r").phase is Phase.ANSWER


class Divider:
    """What a parser of vLLM makes of texts: their reasoning, or whether reasoning is over."""

    def __init__(self, parser: str, tokenizer, start: str) -> None:
        self._class = ReasoningParserManager.get_reasoning_parser(parser)
        self._tokenizer, self._start = tokenizer, start
        self.divides = self._keeps_all_of_a_thought()

    def ends(self, text: str) -> bool:
        """Whether ``REST``, with which ``text`` ends, is no reasoning."""
        if self.divides:
            return REST not in self._reasoning(text)
        return self._is_over(text)

    def tells(self) -> bool:
        """Whether it takes an open thought for one."""
        return self.divides or not self._is_over(THOUGHT)

    def _new(self):
        return self._class(self._tokenizer, chat_template_kwargs=dict(THINKING))

    def _keeps_all_of_a_thought(self) -> bool:
        try:
            return REST in self._reasoning(THOUGHT + REST)
        except (NotImplementedError, TypeError):
            return False

    def _reasoning(self, text: str) -> str:
        reasoning, _ = self._new().extract_reasoning(self._start + text, REQUEST)
        return reasoning or ""

    def _is_over(self, text: str) -> bool:
        ids = self._tokenizer.encode(self._start + text, add_special_tokens=False)
        return self._new().is_reasoning_end(ids)


def differences(parser, name, server) -> tuple[set[str], set[str]]:
    """Candidates that end a thought there only, and here only."""
    tokenizer, boundaries = tokenizer_for(parser, name), boundaries_for(parser, name, server)
    start = FAMILIES[name].start if name else server.parser_start
    divider = Divider(parser, tokenizer, start)
    assert divider.tells()
    ended: tuple[set[str], set[str]] = (set(), set())
    for candidate in (*candidates(), *(server.parser_implicit_ends or ())):
        text = THOUGHT + candidate + REST
        there, here = divider.ends(text), ends_here(boundaries, tokenizer, start, text)
        if there != here:
            ended[here].add(candidate)
    return ended


def told(pairs: Iterable[tuple]) -> list[tuple]:
    return [pair for pair in pairs if pair[-1] not in DO_NOT_TELL | NEED_A_TEMPLATE]


@pytest.mark.parametrize(("name", "parser"), told(BY_FAMILY))
def test_a_thought_ends_where_the_servers_parser_ends_it(name, parser):
    """For each model with a family file, served with each parser that the file names."""
    server = strings_of(parser, name)
    there_only, here_only = differences(parser, name, server)
    assert not there_only
    # A parser that does not tell leaves it to the family, which knows the markers of all efforts.
    if server.parser_implicit_ends is not None:
        assert here_only <= {end for _, end in FAMILIES[name].pairs[1:]}


@pytest.mark.parametrize(
    ("name", "parser"),
    # Harmony's own parser divides the text of gpt-oss.
    [pair for pair in BY_FAMILY if pair[1] in DO_NOT_TELL - {"openai_gptoss"}],
)
def test_parsers_that_cannot_be_asked_agree_on_the_markers(name, parser):
    """A whole text with a family's own markers is divided where we divide it."""
    needed = tokenizer_for(parser, name)
    divider = ReasoningParserManager.get_reasoning_parser(parser)(needed)
    # Parts of markers that a parser needs as tokens would divide our markers here.
    tokenizer = tokenizer_for("none", name)
    boundaries = boundaries_for("none", name, ServerStrings())
    for start, end in FAMILIES[name].pairs:
        divided = divider.extract_reasoning(f"{start}{THOUGHT}{end}{REST}", REQUEST)
        assert divided == (THOUGHT, REST)
        assert not ends_here(boundaries, tokenizer, start, THOUGHT)
        assert ends_here(boundaries, tokenizer, start, THOUGHT + end)


@pytest.mark.parametrize(("parser",), told((parser,) for parser in PARSERS))
def test_a_thought_ends_where_the_parser_ends_it_without_a_family(parser):
    """For models that no family file knows: the parser alone says where thoughts end."""
    server = strings_of(parser, None)
    if boundaries_for(parser, None, server) is None:
        assert parser in WITHOUT_MARKERS
        return
    assert differences(parser, None, server) == (set(), set())


@pytest.mark.parametrize(("name", "parser"), told(BY_FAMILY))
def test_the_family_alone_knows_what_ends_its_thoughts(name, parser):
    """Servers without a parser: the text is divided nowhere, and scheduled all the same."""
    there_only, _ = differences(parser, name, ServerStrings())
    assert not there_only


@pytest.mark.parametrize("parser", sorted(NEED_A_TEMPLATE & set(PARSERS)))
def test_a_parser_of_another_model_is_refused(parser):
    """It cannot be built, which the engine says instead of guessing."""
    with pytest.raises(BoundaryError, match=parser):
        strings_of(parser, None)


@pytest.mark.parametrize(
    ("name", "parser"), [pair for pair in told(BY_FAMILY) if pair[-1] not in NOT_ASKED]
)
def test_a_start_marker_behind_a_thought_is_what_the_parser_says(name, parser):
    """Text of the answer to most, another thought to some."""
    start, end = FAMILIES[name].start, FAMILIES[name].end
    divider = Divider(parser, tokenizer_for(parser, name), start)
    assert divider.divides
    is_text = divider.ends(THOUGHT + end + "b" + start + REST)
    assert strings_of(parser, name).reopens is not is_text


def test_a_parser_of_the_operators_own_is_asked():
    """Without a grammar it says of each added token whether reasoning ends there."""
    base = ReasoningParserManager.get_reasoning_parser("k2_horizon")

    class Own(base):
        _TOOL_CALLS_START = "<tool_call>"
        _EFFORT_TOKENS: ClassVar = {"high": ("<think>", "</think>")}

    ReasoningParserManager.register_module("own_for_a_test", module=Own)
    try:
        assert strings_of("own_for_a_test", None).parser_implicit_ends == ("<tool_call>",)
    finally:
        del ReasoningParserManager.reasoning_parsers["own_for_a_test"]


def test_which_parsers_count_no_reasoning_where_the_prompt_opens_the_thought():
    """What docs/requests.md says of stock: those that look for the start marker in the output."""
    uncounted = set()
    for name, parser in [*told(BY_FAMILY), *told((None, parser) for parser in PARSERS)]:
        tokenizer = tokenizer_for(parser, name)
        own = strings_of(parser, name)
        end = FAMILIES[name].end if name else own.parser_end
        if not end:
            continue
        ids = tokenizer.encode(THOUGHT + end + REST, add_special_tokens=False)
        new = ReasoningParserManager.get_reasoning_parser(parser)(
            tokenizer, chat_template_kwargs=dict(THINKING)
        )
        if not new.count_reasoning_tokens(ids):
            uncounted.add(parser)
    assert uncounted == UNCOUNTED & set(PARSERS)
