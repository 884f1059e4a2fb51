"""Resolves the think boundaries of the model that vLLM serves.

Runs once per EngineCore process, when the scheduler is built; in an API server when a request first
needs the boundaries there.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from meridian_patch.config.family_files import get_family, load_families
from meridian_patch.config.load import LoadedConfig
from meridian_patch.config.matching import FamilyMatch, ModelIdentity, forced_match, match_family
from meridian_patch.engine.reasoning_parser import server_strings
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.markers import ServerStrings, choose_markers
from meridian_patch.phase.resolve import Resolution, resolve
from meridian_patch.phase.sequences import Vocabulary

logger = init_logger("vllm.meridian_patch")


class SinglePhase(NamedTuple):
    """Why the requests of a model have a single phase.

    Attributes:
        why: for the log.
        is_unknown: True if the model may think, and its markers are not known.
    """

    why: str
    is_unknown: bool = False


def resolve_boundaries(vllm_config: Any, loaded: LoadedConfig) -> Boundaries | None:
    """Boundaries of the served model.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        loaded: the configuration, with the origins of its values.

    Returns:
        None when requests have a single phase; the log says why, once.

    Raises:
        BoundaryError: the model's markers cannot be resolved, or sources contradict each other.
        ConfigError: a family file is wrong, or the family cannot be decided.
    """
    found = find_resolution(vllm_config, loaded)
    if isinstance(found, SinglePhase):
        (logger.warning if found.is_unknown else logger.info)("%s", found.why)
        return None
    for note in found.notes:
        logger.warning("meridian_patch: %s", note)
    return found.boundaries


def find_resolution(vllm_config: Any, loaded: LoadedConfig) -> Resolution | SinglePhase:
    """Same as ``resolve_boundaries``, with the sources, and without a word in the log."""
    model_config = vllm_config.model_config
    model = str(model_config.model)
    reason = _reason_for_single_phase(model_config)
    if reason is not None:
        return SinglePhase(f"meridian_patch: model {model} is single-phase: {reason}")
    tokenizer = _load_tokenizer(model_config)
    vocabulary = vocabulary_of(tokenizer, model)
    server = _server_strings(vllm_config, tokenizer, model)
    identity = ModelIdentity(
        names=model_names(
            model,
            model_config.served_model_name,
            getattr(model_config.hf_config, "name_or_path", ""),
        ),
        architectures=tuple(model_config.architectures),
        parser=server.parser or None,
    )
    resolution = resolve_model(model, identity, server, vocabulary, loaded)
    if resolution is None:
        return SinglePhase(describe_unknown(model, identity), is_unknown=True)
    return resolution


def resolve_model(
    model: str,
    identity: ModelIdentity,
    server: ServerStrings,
    vocabulary: Vocabulary,
    loaded: LoadedConfig,
) -> Resolution | None:
    """Family, markers and token sequences of a model; None if its markers are unknown."""
    markers = choose_markers(model, find_family(identity, loaded), server)
    return None if markers is None else resolve(model, markers, vocabulary)


def find_family(identity: ModelIdentity, loaded: LoadedConfig) -> FamilyMatch | None:
    """The family that the configuration forces, or the best match."""
    families = load_families(loaded.config.families_dir)
    forced = loaded.config.family
    if forced is None:
        return match_family(families, identity)
    origin = loaded.origins["family"]
    return forced_match(get_family(families, forced, origin), origin)


def describe_unknown(model: str, identity: ModelIdentity) -> str:
    """The message that says why a model has a single phase, and how to change that."""
    parser = f"reasoning parser {identity.parser!r} gives no markers"
    return (
        f"meridian_patch: model {model} is single-phase, its requests are scheduled as stock "
        f"vLLM does: no family file fits the names {', '.join(identity.names)} or the "
        f"architectures {', '.join(identity.architectures)}, and "
        f"{parser if identity.parser else 'no --reasoning-parser is set'}. If it is a reasoning "
        "model, set --reasoning-parser, or 'family:' in the configuration"
    )


def model_names(model: str, served: str | None, own: str) -> tuple[str, ...]:
    """The names by which a family may be found, without repetition.

    Args:
        model: path or repository.
        served: the first of ``--served-model-name``, the only one that vLLM keeps.
        own: the model's name in config.json.
    """
    # The directory of a snapshot in the Hugging Face cache is named by a hash; the name of the
    # repository is in a parent directory.
    cached = [part for part in model.split("/") if part.startswith("models--")]
    names = [_last_part(model), *cached, _last_part(served or ""), _last_part(own)]
    return tuple(dict.fromkeys(filter(None, names)))


def _last_part(path: str) -> str:
    return path.rstrip("/").split("/")[-1]


def vocabulary_of(tokenizer: Any, model: str) -> Vocabulary:
    """The operations that resolution needs, of a tokenizer of vLLM or transformers."""
    # Load-bearing: without files, transformers makes a tokenizer that encodes no text.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise BoundaryError(
            f"model {model}: the tokenizer cannot encode any text; expected the tokenizer's files "
            "in the model's directory (or in that of --tokenizer)"
        )
    return Vocabulary(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        token_id=tokenizer.get_vocab().get,
        special_ids=frozenset(getattr(tokenizer, "all_special_ids", ())),
        added_ids=frozenset(getattr(tokenizer, "get_added_vocab", dict)().values()),
    )


def _reason_for_single_phase(model_config: Any) -> str | None:
    if model_config.runner_type != "generate":
        return f"its runner is {model_config.runner_type!r}, it generates no text"
    if getattr(model_config, "is_diffusion", False):
        return "it is a diffusion model, it does not generate token by token"
    if model_config.skip_tokenizer_init:
        return "--skip-tokenizer-init is set, markers cannot be turned into tokens"
    return None


def _load_tokenizer(model_config: Any) -> Any:
    try:
        return cached_tokenizer_from_config(model_config)
    except Exception as error:
        raise BoundaryError(
            f"model {model_config.model}: no tokenizer can be loaded from "
            f"{model_config.tokenizer}: {error}. Expected a directory with the tokenizer's files"
        ) from error


def _server_strings(vllm_config: Any, tokenizer: Any, model: str) -> ServerStrings:
    structured = vllm_config.structured_outputs_config
    # Load-bearing: both strings are as configured; vLLM does not replace them by the parser's.
    reasoning = vllm_config.reasoning_config
    parser = structured.reasoning_parser or getattr(reasoning, "reasoning_parser", "")
    # Load-bearing: StructuredOutputManager is built before the scheduler and imports the parser's
    # plug-in, so the parser's name is registered here.
    return replace(
        server_strings(parser, tokenizer, model),
        start=getattr(reasoning, "reasoning_start_str", ""),
        end=getattr(reasoning, "reasoning_end_str", ""),
    )
