"""Resolves the think boundaries of a served model from marker strings to token sequences."""

from dataclasses import dataclass
from itertools import chain

from meridian_patch.config.matching import FamilyMatch
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.markers import Marker, ModelMarkers
from meridian_patch.phase.sequences import MarkerSequences, Vocabulary, find_sequences

REMEDY = (
    "Serve the model with its own tokenizer, or write a family file for this one, put it into "
    "families_dir and set 'family:' to it"
)


@dataclass(frozen=True)
class Resolution:
    """Boundaries, and their sources.

    Attributes:
        boundaries: the token sequences that the tracker uses.
        markers: the strings that they were resolved from.
        sequences: token sequences by marker field.
        notes: messages for the operator, to be logged once.
    """

    boundaries: Boundaries
    markers: ModelMarkers
    sequences: dict[str, tuple[TokenIds, ...]]
    notes: tuple[str, ...]


def resolve(model: str, markers: ModelMarkers, vocabulary: Vocabulary) -> Resolution:
    """Token sequences for all markers, checked against the family file's documented ids.

    Args:
        model: the model's name or path, for messages.
        markers: from ``choose_markers``.
        vocabulary: the served tokenizer's.

    Raises:
        BoundaryError: the tokenizer cannot encode a marker, or ids contradict verified ones.
    """
    notes = list(markers.notes)
    sequences = {}
    for marker in (*markers.start, *markers.end):
        found = find_sequences(marker.text, vocabulary)
        if not found.sequences:
            raise _unresolvable(model, marker, found)
        if found.merged:
            around = ", ".join(repr(text) for text in found.merged)
            notes.append(
                f"model {model}: {marker.field} {marker.text!r} ({marker.origin}) is merged with "
                f"its surroundings by the tokenizer in {around} and is not seen there"
            )
        sequences[marker.field] = found.sequences
    notes += _note_plain_text(model, markers, sequences)
    for marker in markers.implicit_end:
        sequences[marker.field] = _find_optional(model, marker, vocabulary, notes)
    start = _joined(sequences, markers.start)
    end = _joined(sequences, markers.end)
    implicit_end = tuple(ids for ids in _joined(sequences, markers.implicit_end) if ids not in end)
    for shared in set(start) & {*end, *implicit_end}:
        raise BoundaryError(
            f"model {model}: ids {list(shared)} both open and end thinking "
            f"({markers.start[0].origin}: start {markers.start[0].text!r}, end "
            f"{markers.end[0].text!r}). {REMEDY}"
        )
    close = _resolve_close(model, markers, vocabulary, end)
    if markers.match is not None:
        notes += _compare_ids(model, markers, markers.match, sequences, close)
    return Resolution(
        Boundaries(
            markers.label,
            start,
            (*end, *implicit_end),
            close,
            history=markers.match.family.history if markers.match else "unverified",
            tool_call=_find_tool_calls(model, markers, vocabulary, notes),
            implicit_end=implicit_end,
            turn_start=_find_turn_starts(markers, vocabulary, start, (*end, *implicit_end)),
            counts_preamble=markers.begins_reasoning,
            reopens=markers.reopens,
            probe=_resolve_probe(model, markers, vocabulary, end, notes),
        ),
        markers,
        sequences,
        tuple(notes),
    )


def _find_turn_starts(
    markers: ModelMarkers,
    vocabulary: Vocabulary,
    start: tuple[TokenIds, ...],
    end: tuple[TokenIds, ...],
) -> frozenset[int]:
    """Ids that open a turn: those that are told, if the chat template writes any, or its own."""
    entries = map(vocabulary.token_id, markers.turn_start)
    told = frozenset(entry for entry in entries if entry is not None)
    tail = markers.template_turn
    if not told.isdisjoint(tail):
        return told
    thought = min((found for ids in start if (found := _index(tail, ids)) >= 0), default=len(tail))
    used = {*chain.from_iterable(start), *chain.from_iterable(end), *tail[thought:]}
    usable = vocabulary.added_ids - used
    # Some vocabularies have line breaks and runs of spaces as added tokens.
    own = [each for each in tail[:thought] if each in usable and vocabulary.decode([each]).strip()]
    return told.union(own[-1:])


def _index(ids: TokenIds, sequence: TokenIds) -> int:
    """Where a sequence begins for the first time; -1: nowhere."""
    width = len(sequence)
    places = (at for at in range(len(ids) - width + 1) if ids[at : at + width] == sequence)
    return next(places, -1)


def _find_tool_calls(
    model: str, markers: ModelMarkers, vocabulary: Vocabulary, notes: list[str]
) -> tuple[TokenIds, ...]:
    """Sequences that open a tool call."""
    if markers.match is None:
        return ()
    origin = f"file {markers.match.files}"
    found = (
        _find_optional(model, Marker("tool_call", text, origin), vocabulary, notes)
        for text in markers.match.family.tool_call
    )
    return tuple(dict.fromkeys(chain.from_iterable(found)))


def _find_optional(
    model: str, marker: Marker, vocabulary: Vocabulary, notes: list[str]
) -> tuple[TokenIds, ...]:
    """Sequences of a marker; one that cannot be encoded is noted and left out."""
    found = find_sequences(marker.text, vocabulary)
    if not found.sequences:
        notes.append(
            f"model {model}: {marker.field} {marker.text!r} ({marker.origin}) cannot be followed "
            "in tokens and is not seen"
        )
    return found.sequences


def _joined(
    sequences: dict[str, tuple[TokenIds, ...]], markers: tuple[Marker, ...]
) -> tuple[TokenIds, ...]:
    return tuple(dict.fromkeys(ids for marker in markers for ids in sequences[marker.field]))


def _resolve_close(
    model: str, markers: ModelMarkers, vocabulary: Vocabulary, end: tuple[TokenIds, ...]
) -> TokenIds:
    if markers.close.text == markers.end[0].text:
        return end[0]
    ids = tuple(vocabulary.encode(markers.close.text))
    if not any(_holds(ids, sequence) for sequence in end):
        raise BoundaryError(
            f"model {model}: {markers.close.field} {markers.close.text!r} ({markers.close.origin}) "
            f"is ids {list(ids)}, which hold none of the end sequences "
            f"{[list(sequence) for sequence in end]} of {markers.end[0].text!r}, so forcing it "
            "would not end thinking. Let it hold the end marker as tokens of its own"
        )
    return ids


def _resolve_probe(
    model: str,
    markers: ModelMarkers,
    vocabulary: Vocabulary,
    end: tuple[TokenIds, ...],
    notes: list[str],
) -> TokenIds:
    probe = markers.probe
    ids = tuple(vocabulary.encode(probe.text))
    if any(_holds(ids, sequence) for sequence in end):
        return ids
    message = (
        f"model {model}: {probe.field} {probe.text!r} ({probe.origin}) is ids {list(ids)}, which "
        f"hold none of the end sequences {[list(sequence) for sequence in end]} of "
        f"{markers.end[0].text!r}"
    )
    if probe.field == "probe":
        raise BoundaryError(f"{message}. Let it hold the end marker as tokens of its own")
    notes.append(f"{message}, so that thinking is not probed (EAT is off)")
    return ()


def _holds(ids: TokenIds, sequence: TokenIds) -> bool:
    return _index(ids, sequence) >= 0


def _unresolvable(model: str, marker: Marker, found: MarkerSequences) -> BoundaryError:
    why = (
        "the tokenizer merges it with other text wherever it stands"
        if found.merged
        else f"the tokenizer gives back {found.bare_text!r}"
    )
    return BoundaryError(
        f"model {model}: {marker.field} {marker.text!r} ({marker.origin}) cannot be followed in "
        f"tokens: it is encoded as ids {list(found.bare_ids)}, and {why}. {REMEDY}"
    )


def _note_plain_text(
    model: str, markers: ModelMarkers, sequences: dict[str, tuple[TokenIds, ...]]
) -> list[str]:
    """Notes on markers of several tokens that are not documented to be several."""
    documented = markers.match.family.documented_ids if markers.match else None
    return [
        f"model {model}: {marker.field} {marker.text!r} ({marker.origin}) is no vocabulary entry; "
        f"it is followed as text, as ids {list(sequences[marker.field][0])}. If the model has a "
        "token for it, another tokenizer, parser or family is the right one"
        for marker in (markers.start[0], markers.end[0])
        if all(len(ids) > 1 for ids in sequences[marker.field])
        and (
            documented is None
            or documented.is_single(getattr(documented, marker.field, None)) is None
        )
    ]


def _compare_ids(
    model: str,
    markers: ModelMarkers,
    match: FamilyMatch,
    sequences: dict[str, tuple[TokenIds, ...]],
    close: TokenIds,
) -> list[str]:
    """Compare with the family file's documented ids; returns notes on tolerable differences."""
    documented = match.family.documented_ids
    compared = [
        (markers.start[0], documented.start, sequences["start"]),
        (markers.end[0], documented.end, sequences["end"]),
    ]
    if markers.close.field == "close":
        compared.append((markers.close, documented.close, (close,)))
    notes = []
    for marker, expected, found in compared:
        is_split = documented.is_single(expected) is True and all(len(ids) > 1 for ids in found)
        if expected in found or (expected is None and not is_split):
            continue
        written = " or ".join(str(list(ids)) for ids in found)
        message = (
            f"model {model}: {marker.field} {marker.text!r} ({marker.origin}) is ids {written} in "
            f"the served tokenizer, expected {list(expected) if expected else 'a single one'} "
            f"({documented.provenance}: {documented.source})"
        )
        # A model whose family was not found by name may have another vocabulary.
        is_binding = match.how in {"config", "name"}
        if is_binding and is_split:
            raise BoundaryError(f"{message}. The marker is missing from the vocabulary. {REMEDY}")
        if is_binding and documented.provenance == "verified":
            raise BoundaryError(f"{message}. {REMEDY}")
        notes.append(f"{message}; the served tokenizer counts")
    return notes
