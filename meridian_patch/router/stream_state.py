"""What a stream has sent so far, and what its next chunk becomes for the client."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]


class StreamState:
    """Joins the streams of several engines into the one that the client asked for.

    Args:
        body: the request as the client sent it.

    Attributes:
        token_ids: the prompt and all tokens whose text was sent; empty before the first chunk.
        num_output_tokens: how many of them were generated.
        is_answering: whether any text of the answer was sent.
        has_tool_calls: whether a part of a tool call was sent.
        is_ended: whether the choice has ended.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        options = body.get("stream_options") or {}
        self._shows_usage = bool(options.get("include_usage"))
        self._shows_ids = bool(body.get("return_token_ids"))
        # Values that must not change within one stream: id, created, model.
        self._constant: Json = {}
        self._has_begun = False
        self._usage: Json | None = None
        # How thinking ended, as the think engine told it.
        self._told: Json | None = None
        self.token_ids: list[int] = []
        self.num_output_tokens = 0
        self.is_answering = False
        self.has_tool_calls = False
        self.is_ended = False

    def take(self, chunk: Json, *, is_last_of_leg: bool = False) -> Json | None:
        """The chunk for the client; None if the client gets nothing.

        Args:
            chunk: from an engine, with token ids.
            is_last_of_leg: whether the request goes on at another engine after this chunk.
        """
        self._constant = self._constant or {
            name: chunk[name] for name in ("id", "created", "model") if name in chunk
        }
        prompt_ids = chunk.pop("prompt_token_ids", None)
        if prompt_ids and not self.token_ids:
            self.token_ids = list(prompt_ids)
            if self._shows_ids:
                chunk["prompt_token_ids"] = prompt_ids
        if chunk.get("usage") and not chunk.get("choices"):
            self._add_usage(chunk["usage"])
            return None
        chunk.pop("usage", None)
        chunk.pop("kv_transfer_params", None)
        shown = [self._choice(choice, is_last_of_leg) for choice in chunk.get("choices", ())]
        chunk["choices"] = [choice for choice in shown if choice is not None]
        return {**chunk, **self._constant} if chunk["choices"] else None

    def usage_chunk(self) -> Json | None:
        """The last chunk, with the usage of all engines; None if the client asked for none."""
        if not self._shows_usage or self._usage is None:
            return None
        kind = "chat.completion.chunk"
        return {"object": kind, **self._constant, "choices": [], "usage": self._usage}

    def _choice(self, choice: Json, is_last_of_leg: bool) -> Json | None:
        ids = choice.get("token_ids") or []
        self.token_ids += ids
        self.num_output_tokens += len(ids)
        if not self._shows_ids:
            choice["token_ids"] = None
        delta = choice.get("delta", {})
        is_opening = "role" in delta and not delta.get("content")
        if is_opening and self._has_begun:
            return None
        self._has_begun = True
        if delta.get("tool_calls"):
            self.has_tool_calls = True
        if delta.get("content") or choice.get("text"):
            self.is_answering = True
        if is_last_of_leg:
            choice["finish_reason"] = None
            self._told = choice.pop("meridian", None)
            has_text = any(
                delta.get(name) for name in ("content", "reasoning", "reasoning_content")
            )
            return choice if has_text or choice.get("text") or ids else None
        if choice.get("finish_reason"):
            self.is_ended = True
            if self._told:
                choice.setdefault("meridian", self._told)
        return choice

    def _add_usage(self, usage: Json) -> None:
        if self._usage is None:
            self._usage = usage
            return
        self._usage = joined_usage(self._usage, usage)


def joined_usage(first: Json, second: Json) -> Json:
    """The usage of a request that two engines served.

    The second engine's prompt is the first one's prompt and output, so it is not counted again.
    """
    completion = first["completion_tokens"] + second["completion_tokens"]
    total = first["prompt_tokens"] + completion
    return {**first, "completion_tokens": completion, "total_tokens": total}
