"""Encodes and checks a wrap-up, the sentence that a forced close says before the end marker."""

from typing import Final

from meridian_patch.config.family_files import exit_origin
from meridian_patch.config.schema import Config, ExitConfig
from meridian_patch.errors import ConfigError
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event
from meridian_patch.phase.sequences import Vocabulary

MAX_TOKENS: Final = 64
"""Upper bound of a wrap-up's length: each of its tokens takes a step of its own."""


def wrap_up_ids(text: str, vocabulary: Vocabulary, boundaries: Boundaries) -> TokenIds:
    """Tokens of a wrap-up; none for an empty one.

    Args:
        text: the wrap-up, without the end marker, which follows it.
        vocabulary: the served tokenizer's.
        boundaries: of the served model.

    Raises:
        ConfigError: the text cannot be forced; the message says what was expected, to be put behind
            the name of the field.
    """
    if not text:
        return ()
    ids = tuple(vocabulary.encode(text))
    said = vocabulary.decode(list(ids))
    # Tokenizers may add and drop white space.
    if not ids or "".join(said.split()) != "".join(text.split()):
        raise ConfigError(f"expected text that the tokenizer gives back; it gives {said!r}")
    if len(ids) > MAX_TOKENS:
        raise ConfigError(f"expected at most {MAX_TOKENS} tokens, not {len(ids)}")
    special = vocabulary.special_ids & set(ids)
    if special:
        one = vocabulary.decode([min(special)])
        raise ConfigError(f"expected no special token such as {one!r}")
    for marker in (*boundaries.start, *boundaries.end):
        if vocabulary.decode(list(marker)).strip() in text:
            raise ConfigError(
                f"expected text without the marker {vocabulary.decode(list(marker))!r}: the end "
                "marker is forced behind it"
            )
    _check_close(ids, boundaries)
    return ids


def settle_wrap_up(
    exit_config: ExitConfig, whole: Config, vocabulary: Vocabulary, boundaries: Boundaries
) -> ExitConfig:
    """Section ``exit`` of a model, whose wrap-up has been checked.

    A family's own wrap-up is left out where the close sequence has a sentence already: one that the
    server forces, see ``--reasoning-config``.

    Args:
        exit_config: of the configuration and the family.
        whole: the configuration.
        vocabulary: the served tokenizer's.
        boundaries: of the served model.

    Raises:
        ConfigError: the wrap-up cannot be forced; the message names the field and its file.
    """
    is_configured = "wrap_up" in whole.exit.model_fields_set
    if not is_configured and _sentence_of_close(vocabulary, boundaries):
        return exit_config.model_copy(update={"wrap_up": ""})
    try:
        wrap_up_ids(exit_config.wrap_up, vocabulary, boundaries)
    except ConfigError as error:
        origin = exit_origin(whole, boundaries.family, "wrap_up")
        raise ConfigError(f"{origin}: exit.wrap_up is {exit_config.wrap_up!r}, {error}") from error
    return exit_config


def _sentence_of_close(vocabulary: Vocabulary, boundaries: Boundaries) -> str:
    """What the close sequence says before the end marker, without white space around it."""
    close = boundaries.close
    begins = (
        index
        for index in range(len(close))
        if any(close[index : index + len(end)] == end for end in boundaries.end)
    )
    return vocabulary.decode(list(close[: next(begins, 0)])).strip()


def _check_close(ids: TokenIds, boundaries: Boundaries) -> None:
    """Check that the wrap-up and the close sequence end the thought, and only at the end."""
    matcher, state = BoundaryMatcher(boundaries), ROOT
    for index, token_id in enumerate((*ids, *boundaries.close)):
        state, event = matcher.step(state, token_id)
        if event is Event.END and index >= len(ids):
            return
        if event is not Event.NONE:
            break
    raise ConfigError(f"expected text that forms no marker; its ids are {list(ids)}")
