"""What the server's reasoning parser takes for a thought: clients get what it makes of the text."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.reasoning import ReasoningParserManager

from meridian_patch.errors import BoundaryError
from meridian_patch.phase.markers import ServerStrings


def server_strings(parser: str | None, tokenizer: Any, model: str) -> ServerStrings:
    """What parser and chat template say; see ``parser_strings`` and ``template_turn``."""
    strings = parser_strings(parser, tokenizer, model) if parser else ServerStrings()
    return replace(strings, template_turn=template_turn(tokenizer))


def parser_strings(name: str, tokenizer: Any, model: str) -> ServerStrings:
    """What a reasoning parser says of itself: its markers, and what else ends reasoning.

    Args:
        name: the parser's, as given to the server.
        tokenizer: the model's.
        model: its name, for messages.

    Raises:
        BoundaryError: there is no such parser, or the tokenizer is not the one that it expects.
    """
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        start, end = parser.reasoning_start_str or "", parser.reasoning_end_str or ""
    except Exception as error:
        raise BoundaryError(
            f"model {model}: --reasoning-parser {name} cannot be used with the model's tokenizer: "
            f"{error}. Expected the parser that belongs to this model"
        ) from error
    # Load-bearing: a parser on upstream's engine keeps its grammar here.
    grammar = getattr(getattr(parser, "_parser_engine", None), "parser_engine_config", None)
    if grammar is None:
        return ServerStrings(
            name,
            start,
            end,
            parser_implicit_ends=_ends_by_asking(parser, tokenizer, start, end),
            reopens=_reopens_by_asking(parser, start, end),
        )
    return ServerStrings(
        name,
        start,
        end,
        parser_implicit_ends=_ends_of(grammar, end),
        parser_turn_starts=tuple(sorted(grammar.turn_boundary_tokens)),
        begins_reasoning=grammar.initial_state.name == "REASONING",
        # Load-bearing: behind a thought a text goes on in the state `CONTENT`.
        reopens=any(
            state.name == "CONTENT" and transition.next_state.name == "REASONING"
            for (state, _), transition in grammar.transitions.items()
        ),
    )


def template_turn(tokenizer: Any) -> tuple[int, ...]:
    """Ids of what the tokenizer's chat template writes behind a user's message.

    Returns:
        Up to the model's first token; none where no template can be rendered.
    """
    message = "meridian"
    try:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        _, found, behind = prompt.rpartition(message)
        return tuple(_encode(tokenizer, behind)) if found else ()
    except Exception:
        # What a model's template needs is its own affair; the server renders prompts elsewhere.
        return ()


def _ends_of(grammar: Any, end: str) -> tuple[str, ...]:
    """All spellings of what leaves the state of reasoning with its end, but for the end marker."""
    # Load-bearing: states and events by these names; a transition with this event ends the text
    # that clients get as reasoning.
    names = [
        terminal
        for (state, terminal), transition in grammar.transitions.items()
        if state.name == "REASONING"
        and any(event.name == "REASONING_END" for event in transition.events)
    ]
    spellings = [grammar.terminals.get(name, ()) for name in names]
    texts = [text for each in spellings for text in ((each,) if isinstance(each, str) else each)]
    return tuple(text for text in dict.fromkeys(texts) if text != end)


def _ends_by_asking(parser: Any, tokenizer: Any, start: str, end: str) -> tuple[str, ...] | None:
    """The added tokens at which a parser without a grammar ends reasoning; None: it cannot tell.

    Tokens with a digit are left out: they are reserved ones, of which some models have thousands.
    """
    if not start:
        return None
    try:
        begun = [*_encode(tokenizer, start), *_encode(tokenizer, "a")]
        # Some parsers say so of everything, because another part of vLLM divides the text.
        if parser.is_reasoning_end(begun):
            return None
        return tuple(
            text
            for text, token_id in sorted(tokenizer.get_added_vocab().items())
            if text not in {start, end}
            and not any(map(str.isdigit, text))
            and parser.is_reasoning_end([*begun, token_id])
        )
    except Exception:
        # What a parser does with tokens that no model wrote is its own affair.
        return None


def _reopens_by_asking(parser: Any, start: str, end: str) -> bool:
    """Whether a parser without a grammar takes a second thought for one; True: it cannot tell."""
    if not (start and end):
        return True
    try:
        # Load-bearing: the text of a whole response; most parsers do not look at the request.
        reasoning, _ = parser.extract_reasoning(f"{start}first{end}b{start}second", None)
    except Exception:
        return True
    return "second" in (reasoning or "")


def _encode(tokenizer: Any, text: str) -> Iterable[int]:
    return tokenizer.encode(text, add_special_tokens=False)
