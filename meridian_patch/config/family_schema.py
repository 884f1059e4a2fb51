"""The schema of a family file, which describes the models of one family."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from meridian_patch.config.schema import ExitConfig
from meridian_patch.config.strict_model import StrictModel

Provenance = Literal["verified", "third_party", "unverified"]
PromptStart = Literal["think", "pre", "answer", "unverified"]
History = Literal["strip", "keep", "keep_in_tool_loop", "unverified"]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("text that is not blank")
    return text


def _lower_case(text: str) -> str:
    if not text or text != text.lower():
        raise ValueError("a glob in lower case: names are compared in lower case")
    return text


Marker = Annotated[str, AfterValidator(_not_blank)]
Excerpt = Annotated[str, Field(max_length=160), AfterValidator(_not_blank)]
NameGlob = Annotated[str, AfterValidator(_lower_case)]
# YAML has only lists: a list is converted to a tuple, and its items are checked strictly.
Ids = Annotated[tuple[int, ...], Field(strict=False, min_length=1)]


class ModelMatch(StrictModel):
    """Which models belong to a family."""

    names: tuple[NameGlob, ...] = Field(
        default=(), strict=False, description="Globs over the model's names, in lower case."
    )
    architectures: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="`architectures` of config.json that only reasoning models of this family "
        "have.",
    )


class MarkerPair(StrictModel):
    """Another spelling of the markers."""

    start: Marker
    end: Marker


class DocumentedIds(StrictModel):
    """Documented token ids, which are compared with the tokenizer's but never used."""

    start: Ids | None = Field(default=None, description="Ids of `start`.")
    end: Ids | None = Field(default=None, description="Ids of `end`.")
    close: Ids | None = Field(default=None, description="Ids of `close`.")
    single_token: bool | None = Field(
        default=None,
        description="Whether a marker without ids here is one vocabulary entry; unset: not known.",
    )
    provenance: Provenance = Field(
        description="`verified`: seen in a tokenizer file; `third_party`: in other engines' code "
        "only; `unverified`: neither."
    )
    source: str = Field(description="Where the ids, or the strings when there are none, are from.")

    def is_single(self, ids: tuple[int, ...] | None) -> bool | None:
        """Whether a marker with these documented ids is one vocabulary entry; None: not known."""
        return len(ids) == 1 if ids else self.single_token


class HistoryEvidence(StrictModel):
    """The evidence for the history rule."""

    line: Excerpt | None = Field(
        default=None, description="The line that decides, at most 160 characters; unset: not seen."
    )
    source: Marker = Field(description="Where it was read.")
    provenance: Provenance = Field(
        description="`verified`: in the model's own template, a copy without visible changes, or "
        "vLLM's renderer; `third_party`: in a changed copy or as others quote it; `unverified`: "
        "neither."
    )
    note: str = Field(default="", description="When the rule differs, with a switch's default.")

    @model_validator(mode="after")
    def _check_line(self) -> Self:
        if self.provenance != "unverified" and self.line is None:
            raise ValueError(
                f"a line, because provenance is {self.provenance!r}; quote the line of the "
                "template or set provenance to unverified"
            )
        return self


class Family(StrictModel):
    """One family file."""

    version: Literal[1] = Field(description="Version of this format.")
    family: Marker = Field(description="Equal to the file's name without its suffix.")
    replaces: bool = Field(
        default=False, description="Whether this file replaces the packaged one of this family."
    )
    match: ModelMatch = Field(default_factory=ModelMatch)
    parsers: tuple[str, ...] = Field(
        default=(), strict=False, description="vLLM's reasoning parsers for these models."
    )
    start: Marker = Field(description="Text that opens thinking.")
    end: Marker = Field(description="Text that ends thinking.")
    alternatives: tuple[MarkerPair, ...] = Field(
        default=(), strict=False, description="Other spellings that the models also use."
    )
    close: Marker | None = Field(
        default=None, description="Text that is forced to end thinking; unset: `end`."
    )
    probe: Marker | None = Field(
        default=None,
        description="Trial boundary: text that a probe appends to a thought to measure how certain "
        "its answer is; it contains an end marker. Unset: a line break, `end`, a blank line.",
    )
    exit: ExitConfig = Field(
        default_factory=ExitConfig,
        description="Early exit for this family: any fields of section `exit`. The configuration's "
        "value of a field takes precedence.",
    )
    implicit_end: tuple[Marker, ...] = Field(
        default=(),
        strict=False,
        description="Texts that end thinking without the end marker, because the answer begins "
        "with them: a tool call's. A server with `--reasoning-parser` uses the parser's instead.",
    )
    turn_start: tuple[Marker, ...] = Field(
        default=(),
        strict=False,
        description="Vocabulary entries with which the template opens a turn. Markers in a prompt "
        "count behind the last one only: those before it are text of a message. A server's "
        "`--reasoning-parser` may know more. Without any, it is the last added token that the "
        "chat template of a Hugging Face tokenizer writes behind a user's message and before a "
        "thought.",
    )
    documented_ids: DocumentedIds
    prompt_start: PromptStart = Field(
        description="How a default prompt ends: `think` with the open marker, `pre` before it (the "
        "model writes it), `answer` with closed thinking. Each request's prompt decides."
    )
    history: History = Field(
        description="What the chat template does with the thinking of earlier turns."
    )
    history_evidence: HistoryEvidence | None = Field(
        default=None,
        description="Evidence for the rule: the template's `line`, `source`, `provenance` and a "
        "`note`; required in packaged files with a history.",
    )
    tool_call: tuple[Marker, ...] = Field(
        default=(),
        strict=False,
        description="Texts that mark a tool call in the output; used only with history "
        "`keep_in_tool_loop`. Without one, outputs are kept as in stock.",
    )
    notes: str = Field(default="", description="What else a reader should know.")

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All spellings of (start, end), the first one first."""
        return ((self.start, self.end), *((pair.start, pair.end) for pair in self.alternatives))

    @property
    def probe_text(self) -> str:
        """``probe``, or its default (EAT, arXiv:2509.26522)."""
        return self.probe or probe_around(self.end)

    @property
    def markers(self) -> tuple[object, ...]:
        """The fields that must be equal in all families that fit a model equally well."""
        return self.pairs, self.close

    @model_validator(mode="after")
    def _check_markers(self) -> Self:
        for start, end in self.pairs:
            if start == end:
                raise ValueError(f"start and end are both {start!r}, expected two markers")
        for name, text in (("close", self.close), ("probe", self.probe)):
            if text and not any(end.strip() in text for _, end in self.pairs):
                raise ValueError(f"{name} is {text!r}, expected text that holds end {self.end!r}")
        return self


def probe_around(end: str) -> str:
    """The trial boundary of a family that sets none (EAT, arXiv:2509.26522)."""
    return f"\n{end}\n\n"
