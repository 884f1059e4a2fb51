"""Chooses the marker strings: those of the family file, the server's, or both."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meridian_patch.config.family_schema import probe_around
from meridian_patch.config.matching import FamilyMatch
from meridian_patch.errors import BoundaryError


@dataclass(frozen=True)
class ServerStrings:
    """Marker strings that the server was started with; empty strings for missing ones.

    Attributes:
        parser: name of vLLM's reasoning parser.
        parser_start: the parser's ``reasoning_start_str``.
        parser_end: the parser's ``reasoning_end_str``.
        parser_implicit_ends: with what an answer begins that ends reasoning to the parser without
            its end marker; None: the parser does not tell.
        parser_turn_starts: what opens or ends a turn to the parser.
        template_turn: ids of what the chat template writes behind a user's message.
        begins_reasoning: whether the parser begins within a thought.
        reopens: whether a thought may follow an answer, to the parser.
        start: ``reasoning_start_str`` of ``--reasoning-config``.
        end: ``reasoning_end_str`` of ``--reasoning-config``; a phrase may precede the marker.
    """

    parser: str = ""
    parser_start: str = ""
    parser_end: str = ""
    parser_implicit_ends: tuple[str, ...] | None = None
    parser_turn_starts: tuple[str, ...] = ()
    template_turn: tuple[int, ...] = ()
    begins_reasoning: bool = False
    reopens: bool = True
    start: str = ""
    end: str = ""


@dataclass(frozen=True)
class Marker:
    """One marker string, its field and its source."""

    field: str
    text: str
    origin: str


@dataclass(frozen=True)
class ModelMarkers:
    """All markers of one model, still as text.

    Attributes:
        label: name of the model's family in messages.
        start: markers that open thinking.
        end: markers that end thinking.
        implicit_end: texts with which an answer begins that end thinking without a marker.
        turn_start: texts that open a turn of a prompt.
        template_turn: as in ``ServerStrings``.
        begins_reasoning, reopens: as in ``ServerStrings``.
        close: the text that is forced to end thinking.
        probe: the trial boundary that a probe appends to a thought; its field is ``probe`` if a
            family file sets it.
        match: the family file; None if only the server's strings are known.
        notes: messages for the operator, to be logged once.
    """

    label: str
    start: tuple[Marker, ...]
    end: tuple[Marker, ...]
    close: Marker
    probe: Marker
    match: FamilyMatch | None
    implicit_end: tuple[Marker, ...] = ()
    turn_start: tuple[str, ...] = ()
    template_turn: tuple[int, ...] = ()
    begins_reasoning: bool = False
    reopens: bool = True
    notes: tuple[str, ...] = ()


def choose_markers(
    model: str, match: FamilyMatch | None, server: ServerStrings
) -> ModelMarkers | None:
    """Combine a family file with the server's strings.

    1. If the operator forced a family whose markers differ from the server's, only the family's
       are used.
    2. Otherwise a family file and the server's strings must agree: one is a prefix of the other,
       without surrounding white space. Then the file's are used, and the server's end string is
       the one that is forced.
    3. If a family that was found only by the parser's name differs, the server's strings are used.
    4. Without a family the server's strings are used.

    What ends a thought without an end marker is the parser's choice where the parser tells, because
    clients get what it makes of the text, and the family file's otherwise.

    Returns:
        None if no source defines the markers.

    Raises:
        BoundaryError: family file and server disagree.
    """
    if match is None:
        return _from_server(server)
    clash = _find_clash(match, server)
    if clash is None:
        return _from_family(match, server, ())
    if match.how == "config":
        template = ServerStrings(template_turn=server.template_turn)
        return _from_family(match, template, (f"{clash}; the forced family counts",))
    if match.how == "parser":
        return _from_server(server)
    raise BoundaryError(
        f"model {model}: {clash}. Start the server with the parser or strings of this model, or "
        f"set 'family: {match.family.family}' in the configuration if the file is right, or put "
        "a family file of your own into families_dir if it is not"
    )


def _from_family(match: FamilyMatch, server: ServerStrings, notes: tuple[str, ...]) -> ModelMarkers:
    family = match.family
    origin = f"file {match.files}"
    names = ["", *(f"alternatives.{index}." for index in range(len(family.alternatives)))]
    start = [
        Marker(f"{name}start", text, origin)
        for name, (text, _) in zip(names, family.pairs, strict=True)
    ]
    end = [
        Marker(f"{name}end", text, origin)
        for name, (_, text) in zip(names, family.pairs, strict=True)
    ]
    close = Marker("close" if family.close else "end", family.close or family.end, origin)
    if server.end:
        close = Marker("reasoning_end_str", server.end, "--reasoning-config")
    probe = Marker("probe" if family.probe else "end", family.probe_text, origin)
    implicit_end = _implicit_ends(server, end)
    if implicit_end is None:
        implicit_end = _numbered(family.implicit_end, origin)
    return ModelMarkers(
        match.label,
        tuple(start),
        tuple(end),
        close,
        probe,
        match,
        implicit_end,
        (*family.turn_start, *server.parser_turn_starts),
        server.template_turn,
        server.begins_reasoning,
        server.reopens,
        notes,
    )


def _from_server(server: ServerStrings) -> ModelMarkers | None:
    """Markers from the server's strings, combined as in vLLM: configured before the parser's."""
    if not (server.start or server.parser_start) or not (server.end or server.parser_end):
        return None
    parser = f"--reasoning-parser {server.parser}"
    configured = "--reasoning-config"
    start = Marker(
        "reasoning_start_str",
        server.start or server.parser_start,
        configured if server.start else parser,
    )
    forced = Marker(
        "reasoning_end_str", server.end or server.parser_end, configured if server.end else parser
    )
    natural = forced
    if server.parser_end:
        natural = Marker("reasoning_end_str", server.parser_end, parser)
    label = f"<parser {server.parser}>" if server.parser else "<reasoning config>"
    probe = Marker(natural.field, probe_around(natural.text), natural.origin)
    implicit_end = _implicit_ends(server, [natural]) or ()
    return ModelMarkers(
        label,
        (start,),
        (natural,),
        forced,
        probe,
        None,
        implicit_end,
        server.parser_turn_starts,
        server.template_turn,
        server.begins_reasoning,
        server.reopens,
    )


def _implicit_ends(server: ServerStrings, end: Sequence[Marker]) -> tuple[Marker, ...] | None:
    """Implicit ends that the parser lists, less those in ``end``; None if it gives no list."""
    if server.parser_implicit_ends is None:
        return None
    known = {marker.text.strip() for marker in end}
    texts = [text for text in server.parser_implicit_ends if text.strip() not in known]
    return _numbered(texts, f"--reasoning-parser {server.parser}")


def _numbered(texts: Iterable[str], origin: str) -> tuple[Marker, ...]:
    return tuple(Marker(f"implicit_end.{index}", text, origin) for index, text in enumerate(texts))


def _find_clash(match: FamilyMatch, server: ServerStrings) -> str | None:
    starts = [start for start, _ in match.family.pairs]
    ends = [end for _, end in match.family.pairs]
    parser = f"--reasoning-parser {server.parser}"
    compared = (
        ("start", "reasoning_start_str", parser, server.parser_start, starts),
        ("start", "reasoning_start_str", "--reasoning-config", server.start, starts),
        ("end", "reasoning_end_str", parser, server.parser_end, ends),
    )
    for field, name, origin, text, ours in compared:
        if text and not any(_is_beginning(text, marker) for marker in ours):
            return (
                f"{field} is {ours[0]!r} in file {match.files}, but {name} of {origin} is {text!r}"
            )
    if server.end and not any(end.strip() in server.end for end in ends):
        return (
            f"end is {ends[0]!r} in file {match.files}, but reasoning_end_str of "
            f"--reasoning-config is {server.end!r}, which does not hold it"
        )
    return None


def _is_beginning(one: str, other: str) -> bool:
    one, other = one.strip(), other.strip()
    return one.startswith(other) or other.startswith(one)
