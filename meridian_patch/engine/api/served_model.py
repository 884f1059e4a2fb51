"""What the API server knows of the served model: its boundaries, and defaults of requests."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import cached_tokenizer_from_config

from meridian_patch.config.load import LoadedConfig
from meridian_patch.config.request_options import WRAP_UP, RequestOptions, stop_scope
from meridian_patch.engine.boundaries import find_resolution, vocabulary_of
from meridian_patch.errors import ConfigError
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.phase.matcher import BoundaryMatcher
from meridian_patch.phase.output_phases import OutputPhases
from meridian_patch.phase.resolve import Resolution
from meridian_patch.phase.sequences import Vocabulary
from meridian_patch.phase.wrap_up import wrap_up_ids

_SERVED: WeakKeyDictionary[Any, "ServedModel"] = WeakKeyDictionary()


class ServedModel:
    """The served model, as the API server or the process of ``vllm.LLM`` knows it.

    Its boundaries are resolved when they are first needed, in about 0.2 s. EngineCore resolves the
    same ones from the same configuration, and refuses to start where that fails.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        loaded: this process's configuration.
    """

    def __init__(self, vllm_config: Any, loaded: LoadedConfig) -> None:
        self._vllm_config = vllm_config
        self._loaded = loaded

    @property
    def reasoning_parser(self) -> str:
        """Name of the server's reasoning parser; empty without one."""
        return str(self._vllm_config.structured_outputs_config.reasoning_parser or "")

    def scope_of(self, params: Any) -> str:
        """Where a request's stop strings match: ``all`` or ``answer``.

        Args:
            params: its sampling parameters, whose ``meridian_*`` fields have been checked.
        """
        default = self._loaded.config.requests.stop_scope
        return stop_scope(getattr(params, "extra_args", None), default)

    @cached_property
    def resolution(self) -> Resolution | None:
        """Boundaries and their sources; None if the model does not think.

        Raises:
            BoundaryError: the model's markers cannot be resolved.
            ConfigError: a family file is wrong, or the family cannot be decided.
        """
        # Load-bearing: only servers and EngineCore import the plug-in, `vllm.LLM` does not.
        structured = self._vllm_config.structured_outputs_config
        plugin, parser = structured.reasoning_parser_plugin, structured.reasoning_parser
        if plugin and parser not in ReasoningParserManager.list_registered():
            ReasoningParserManager.import_reasoning_parser(plugin)
        found = find_resolution(self._vllm_config, self._loaded)
        return found if isinstance(found, Resolution) else None

    @cached_property
    def matcher(self) -> BoundaryMatcher | None:
        """Finds the boundaries in tokens; None if the model does not think."""
        resolution = self.resolution
        return None if resolution is None else BoundaryMatcher(resolution.boundaries)

    def check_wrap_up(self, text: str) -> None:
        """Check that a wrap-up can be forced on this model.

        Raises:
            ConfigError: it cannot; the message says what was expected.
            BoundaryError: the model's markers cannot be resolved.
        """
        if self.resolution is None:
            return
        try:
            wrap_up_ids(text, self._vocabulary, self.resolution.boundaries)
        except ConfigError as error:
            raise ConfigError(f"vllm_xargs field {WRAP_UP} is {text!r}, {error}") from error

    def with_patterns(
        self, extra_args: Mapping[str, Any], options: RequestOptions
    ) -> Mapping[str, Any]:
        """A request's extra arguments, in which patterns that end a thought are tokens.

        Raises:
            ConfigError: a pattern cannot be followed in tokens; the message names the field.
            BoundaryError: the model's markers cannot be resolved.
        """
        if self.resolution is None:
            return extra_args
        return self._patterns.in_fields(extra_args, options)

    @cached_property
    def _patterns(self) -> PatternTokens:
        vocab_size = self._vllm_config.model_config.get_vocab_size()
        return PatternTokens(lambda: self._vocabulary, vocab_size)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        model_config = self._vllm_config.model_config
        return vocabulary_of(cached_tokenizer_from_config(model_config), str(model_config.model))

    def phases_for_stops(self, params: Any, prompt: list[int] | None) -> OutputPhases | None:
        """Phases of a new request's output; None if its stop strings match everywhere."""
        if self.scope_of(params) == "all" or self.matcher is None:
            return None
        return OutputPhases(self.matcher, prompt or ())


def served_through(engine_client: Any) -> ServedModel | None:
    """The model behind an engine client of vLLM's; None if it is not known."""
    processor = getattr(engine_client, "input_processor", None)
    return getattr(processor, "served_model", None)


def register(tokenizer: Any, served: ServedModel) -> None:
    """Note which model an engine's tokenizer belongs to.

    vLLM's output processor knows nothing of its engine but the tokenizer. Two engines of one
    process that share a tokenizer have the same boundaries.
    """
    _SERVED[tokenizer] = served


def served_by(tokenizer: Any) -> ServedModel | None:
    """The model of an engine's tokenizer; None if no engine of this process has it."""
    return None if tokenizer is None else _SERVED.get(tokenizer)
