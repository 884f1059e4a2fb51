"""What a stream has sent so far, and what its next chunk becomes for the client."""

from collections.abc import Mapping
from typing import Any

from meridian_patch.handoff.requests import as_whole, is_true, num_prompts
from meridian_patch.handoff.ticket import FACTS, PROMPT_IDS

Json = dict[str, Any]

_THOUGHT = ("reasoning", "reasoning_content")
_ANSWER = ("content", "tool_calls")


def without_places(choice: Json) -> None:
    """Leave out which tokens were forced: an engine counts from its own first token."""
    told = choice.get("meridian")
    if isinstance(told, dict) and "forced_tokens" in told:
        choice["meridian"] = {key: told[key] for key in told if key != "forced_tokens"}


class StreamState:
    """Joins the streams of several engines into the one that the client asked for.

    Engines are asked for token ids, usage and reasoning, whether the client wants them or not.

    Args:
        body: the request as the client sent it.

    Attributes:
        token_ids: the prompt and all tokens whose text was sent; empty before the first chunk.
        num_output_tokens: how many of them were generated.
        has_text: whether any text was sent.
        is_answering: whether any text of the answer was sent, by the engine that goes on with it.
        has_tool_calls: whether a part of a tool call was sent.
        is_ended: whether every choice has ended.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        options = body.get("stream_options")
        self._shows_usage = isinstance(options, dict) and is_true(options.get("include_usage"))
        # As vLLM: without the reasoning there are no ids and no log-probabilities either.
        self._shows_thought = is_true(body.get("include_reasoning"), default=True)
        self._shows_ids = is_true(body.get("return_token_ids")) and self._shows_thought
        # The engine refuses a number below 1.
        self._left = max(as_whole(body.get("n"), default=1), 1) * num_prompts(body)
        # Only the first prompt's ids are known.
        self._is_counted = num_prompts(body) == 1
        # Values that must not change within one stream: id, object, created, model.
        self._constant: Json = {}
        self._usage: Json | None = None
        self._num_legs_counted = 0
        # How thinking ended, as the think engine told it.
        self._told: Json | None = None
        self._has_role = False
        # Tokens at the last chunk that had text: a parser may hold back what the later ones say.
        self._num_shown = 0
        # Tokens at the last chunk that told the client ids or log-probabilities.
        self._num_told = 0
        # Generated tokens that a ticket allows in all.
        self._most_output_tokens: int | None = None
        self.token_ids: list[int] = []
        self.num_output_tokens = 0
        self.has_text = False
        self.is_answering = False
        self.has_tool_calls = False

    @property
    def is_ended(self) -> bool:
        """Whether every choice has ended."""
        return self._left <= 0

    @property
    def has_told(self) -> bool:
        """Whether the client has any token's id or log-probability."""
        return self._num_told > len(self.token_ids) - self.num_output_tokens

    @property
    def has_told_unshown(self) -> bool:
        """Whether it has those of tokens whose text it has not."""
        return self._num_told > self._num_shown

    @property
    def usage(self) -> Json | None:
        """What the client is charged for: the prompt once, and every generated token."""
        is_lost = self._usage is None and self.is_ended and bool(self.token_ids)
        is_lost = is_lost and self._is_counted
        if not is_lost and (self._usage is None or self._num_legs_counted == 1):
            return self._usage
        prompt = len(self.token_ids) - self.num_output_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": self.num_output_tokens}
        return {**(self._usage or {}), **counts, "total_tokens": len(self.token_ids)}

    @property
    def num_tokens_left(self) -> int | None:
        """How many more tokens may be generated, as a ticket had it; None without one."""
        if self._most_output_tokens is None:
            return None
        return max(self._most_output_tokens - self.num_output_tokens, 1)

    def begin_leg(self) -> None:
        """Another engine goes on with the request."""
        self._num_legs_counted += 1

    def begin_again(self) -> None:
        """Forget tokens of which the client has no text: the request is sent from its beginning."""
        self.token_ids, self.num_output_tokens = [], 0
        self._num_shown = self._num_told = 0
        self._num_legs_counted = 0

    def continue_from(self, ticket: Mapping[str, Any]) -> None:
        """Take over the tokens of a ticket."""
        self.token_ids = list(ticket[PROMPT_IDS])
        self._num_shown = len(self.token_ids)
        # Without a reasoning parser, the thought came as content.
        self.is_answering = False
        self.num_output_tokens = ticket[FACTS]["num_output_tokens"]
        self._most_output_tokens = self.num_output_tokens + ticket[FACTS]["max_tokens_left"]

    def forget_unshown(self) -> None:
        """Forget the last tokens as far as the client has nothing of them."""
        if not self.has_told_unshown:
            self.num_output_tokens -= len(self.token_ids) - self._num_shown
            del self.token_ids[self._num_shown :]

    def take(self, chunk: Json, *, is_last_of_leg: bool = False) -> Json | None:
        """The chunk for the client; None if the client gets nothing.

        Args:
            chunk: from an engine, with token ids.
            is_last_of_leg: whether the request goes on at another engine after this chunk.
        """
        self._constant = self._constant or {
            name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk
        }
        chunk.pop("kv_transfer_params", None)
        usage = chunk.pop("usage", None)
        if usage and not chunk.get("choices"):
            self._usage = {**usage, **self._details()} if self._usage else usage
            return None
        self._take_prompt(chunk)
        shown = [self._choice(choice, is_last_of_leg) for choice in chunk.get("choices", ())]
        chunk["choices"] = [choice for choice in shown if choice is not None]
        return {**chunk, **self._constant} if chunk["choices"] else None

    def usage_chunk(self) -> Json | None:
        """The last chunk, with the usage of all engines; None if the client asked for none."""
        usage = self.usage
        if not self._shows_usage or usage is None:
            return None
        return {"object": "chat.completion.chunk", **self._constant, "choices": [], "usage": usage}

    def _details(self) -> Json:
        """The first engine's details: it saw the prompt and the thought as the client does."""
        names = ("completion_tokens_details", "prompt_tokens_details")
        kept = self._usage or {}
        return {name: kept[name] for name in names if name in kept}

    def _take_prompt(self, holder: Json) -> None:
        """Note the prompt's ids; chat has them in the chunk, completions in the choice."""
        ids = holder.pop("prompt_token_ids", None)
        if ids and not self.token_ids:
            self.token_ids = list(ids)
            self._num_shown = len(ids)
            if self._shows_ids:
                holder["prompt_token_ids"] = ids

    def _note_shown(self, choice: Json, delta: Json, *, has_ids: bool) -> None:
        if choice.get("text") or any(delta.get(name) for name in (*_THOUGHT, *_ANSWER)):
            self._num_shown = len(self.token_ids)
        if has_ids and self._shows_thought and (self._shows_ids or choice.get("logprobs")):
            self._num_told = len(self.token_ids)

    def _choice(self, choice: Json, is_last_of_leg: bool) -> Json | None:
        self._take_prompt(choice)
        ids = choice.get("token_ids") or []
        self.token_ids += ids
        self.num_output_tokens += len(ids)
        if not self._shows_ids:
            choice["token_ids"] = None
        delta = choice.get("delta", {})
        self._note_shown(choice, delta, has_ids=bool(ids))
        if not self._shows_thought:
            choice["logprobs"] = None
            for name in _THOUGHT:
                delta.pop(name, None)
        is_opening = "role" in delta and not delta.get("content") and not ids
        if is_opening and self._has_role and self._left == 1:
            return None
        self._has_role |= "role" in delta
        has_tool_calls = bool(delta.get("tool_calls"))
        has_answer = bool(delta.get("content") or choice.get("text") or has_tool_calls)
        has_text = has_answer or any(delta.get(name) for name in _THOUGHT)
        self.has_tool_calls |= has_tool_calls
        self.is_answering |= has_answer
        self.has_text |= has_text
        if is_last_of_leg:
            choice["finish_reason"] = None
            self._told = choice.pop("meridian", None)
            return choice if has_text or (ids and self._shows_ids) else None
        if choice.get("finish_reason"):
            self._left -= 1
            if self._told:
                choice.setdefault("meridian", self._told)
            if self._num_legs_counted > 1:
                without_places(choice)
        elif not self._shows_thought and not has_text and not is_opening:
            return None
        return choice
