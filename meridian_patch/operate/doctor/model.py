"""Judges a model's files: tokenizer, family, boundaries and chat template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meridian_patch.engine.model_files import find_model
from meridian_patch.errors import MeridianError
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.operate.http_client import read_object
from meridian_patch.phase.tracker import Phase, PhaseTracker

AREA = Area("model")
# Any of these holds a tokenizer that transformers or vLLM reads.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_FAMILY_PAGE = "docs/model-families.md"
_PUBLISHED = "the files that the model was published with"


def check_model(model: str, reasoning_parser: str | None) -> Iterator[Finding]:
    """Everything that a model's files tell; reads no weights.

    Args:
        model: directory, or a name in the Hugging Face cache.
        reasoning_parser: as given to the server, or None.
    """
    folder = find_model(model)
    if folder is None:
        yield AREA.fail(
            "files",
            f"{model} is no directory, and the Hugging Face cache has no model of that name",
            expected="a directory with config.json and the tokenizer's files, or a cached name",
            fix=f"hf download {model}, or name the model's directory",
        )
        return
    wrong = list(_wrong_files(folder))
    yield from wrong
    if wrong:
        return
    yield AREA.ok("files", str(folder))
    yield from _check_phases(str(folder), reasoning_parser)


def _wrong_files(folder: Path) -> Iterator[Finding]:
    path = folder / "config.json"
    try:
        is_config = bool(read_object(path.read_text(encoding="utf-8")))
        found = f"{path} holds no JSON object with keys"
    except (OSError, UnicodeDecodeError) as error:
        is_config, found = False, f"{folder} has no config.json that can be read: {error}"
    if not is_config:
        yield AREA.fail(
            "files",
            found,
            expected=_PUBLISHED,
            fix=f"copy or download config.json into {folder}",
        )
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield AREA.fail(
            "tokenizer",
            f"{folder} has none of {', '.join(_TOKENIZERS)}",
            expected=_PUBLISHED,
            fix=f"copy or download the tokenizer's files into {folder}",
        )


def _check_phases(folder: str, reasoning_parser: str | None) -> Iterator[Finding]:
    from meridian_patch.engine.boundaries import describe_unknown
    from meridian_patch.engine.model_directory import read_model

    try:
        read = read_model(folder, reasoning_parser, None)
    except MeridianError as error:
        yield _unresolved(str(error))
        return
    if read.resolution is None:
        yield AREA.warn(
            "family",
            describe_unknown(folder, read.identity).removeprefix("meridian_patch: "),
            expected="a family file that fits, for a model that thinks",
            fix="start with --reasoning-parser, or set MERIDIAN_PATCH_SET_FAMILY to a family of "
            f"{_FAMILY_PAGE}; nothing, if the model does not think",
        )
        return
    markers, boundaries = read.resolution.markers, read.resolution.boundaries
    match = markers.match
    found_by = f"by {match.how} {match.evidence}" if match else "by the server's strings"
    yield AREA.ok("family", f"{boundaries.family}, found {found_by}")
    texts = [f"{each.text!r}" for each in (*markers.start, *markers.end, *markers.implicit_end)]
    ids = f"start {_ids(boundaries.start)}, end {_ids(boundaries.end)}"
    if read.resolution.notes:
        yield AREA.warn(
            "think boundaries",
            "; ".join(read.resolution.notes),
            expected="boundaries as documented",
            fix=f"compare with the model's card: meridian boundaries {folder}",
        )
    else:
        yield AREA.ok("think boundaries", f"{' '.join(texts)}: ids {ids}")
    told = match.family.prompt_start if match else "unverified"
    yield check_template(read.tokenizer, PhaseTracker(boundaries), told)


def _unresolved(message: str) -> Finding:
    if "no usable" in message:
        return AREA.fail(
            "tokenizer",
            message,
            expected=_PUBLISHED,
            fix="download the tokenizer's files again, or update transformers",
        )
    return AREA.fail(
        "think boundaries",
        message,
        expected="boundaries that the tokenizer can write",
        fix=f"set family in the configuration to one of {_FAMILY_PAGE}, or write its file",
    )


def check_template(tokenizer: Any, tracker: PhaseTracker, told: str) -> Finding:
    """Whether a default prompt ends inside a thought, and whether the family says so too.

    Args:
        tokenizer: transformers' tokenizer.
        tracker: of the model's boundaries.
        told: the family's ``prompt_start``.
    """
    check = "chat template"
    messages = [{"role": "user", "content": "2+2?"}]
    try:
        # Text first: what the template returns as ids differs between releases.
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return AREA.warn(
            check,
            f"no prompt can be made of a chat: {why}",
            expected="a chat template",
            fix="start the server with --chat-template, or use /v1/completions only",
        )
    tracker.add("prompt", ids)
    state = tracker.get("prompt")
    opens = state is not None and state.first_phase is Phase.THINK
    found = "a prompt ends inside a thought" if opens else "a prompt ends outside of thoughts"
    if told in {"unverified", "think" if opens else "answer"} or (told == "pre" and not opens):
        after = "" if opens else "; the model writes the opening itself, or answers at once"
        return AREA.ok(check, found + after)
    return AREA.warn(
        check,
        found,
        expected=f"as the family says: prompt_start {told}",
        fix="compare the template with the model's own; the prompt decides, not the file",
    )


def _ids(sequences: tuple[tuple[int, ...], ...]) -> str:
    return " or ".join("+".join(map(str, sequence)) for sequence in sequences)
