"""Reads tokenizer, identity and boundaries from a model directory, without an engine."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PretrainedConfig

from meridian_patch.config.load import LoadedConfig, process_config
from meridian_patch.config.matching import ModelIdentity
from meridian_patch.engine.boundaries import (
    model_names,
    resolve_model,
    vocabulary_of,
)
from meridian_patch.engine.model_files import describe_missing, find_model
from meridian_patch.engine.reasoning_parser import server_strings
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.resolve import Resolution
from meridian_patch.phase.sequences import Vocabulary


class ModelDirectory(NamedTuple):
    """A model as its files describe it.

    Attributes:
        tokenizer: transformers' tokenizer.
        vocabulary: its operations that resolution needs.
        identity: names, architectures and parser, by which the family was found.
        resolution: the boundaries; None for a single phase.
        loaded: the configuration that was used.
    """

    tokenizer: Any
    vocabulary: Vocabulary
    identity: ModelIdentity
    resolution: Resolution | None
    loaded: LoadedConfig


def read_model(model: str, reasoning_parser: str | None, family: str | None) -> ModelDirectory:
    """Resolve a model as the scheduler would.

    Args:
        model: directory with config.json and the tokenizer's files, or a cached name.
        reasoning_parser: as given to the server, or None.
        family: forces a family, as ``family:`` in the configuration does.

    Raises:
        BoundaryError: no such model on this machine, no tokenizer, or unresolvable boundaries.
        ConfigError: wrong configuration or family file, unknown family.
    """
    loaded = _with_family(process_config(), family)
    directory = find_model(model)
    if directory is None:
        raise BoundaryError(describe_missing(model))
    model = str(directory)
    tokenizer = _load(AutoTokenizer.from_pretrained, model, "tokenizer")
    vocabulary = vocabulary_of(tokenizer, model)
    identity = _identify(model, reasoning_parser)
    server = server_strings(reasoning_parser, tokenizer, model)
    resolution = resolve_model(model, identity, server, vocabulary, loaded)
    return ModelDirectory(tokenizer, vocabulary, identity, resolution, loaded)


def _with_family(loaded: LoadedConfig, family: str | None) -> LoadedConfig:
    if family is None:
        return loaded
    config = loaded.config.model_copy(update={"family": family})
    origins = {**loaded.origins, "family": "option --family"}
    return dataclasses.replace(loaded, config=config, origins=origins)


def _load(loader: Any, model: str, what: str) -> Any:
    try:
        return loader(model, local_files_only=True)
    except Exception as error:
        raise BoundaryError(
            f"model directory {model} has no usable {what}: {error}. Expected the files that the "
            "model was published with"
        ) from error


def _identify(model: str, parser: str | None) -> ModelIdentity:
    # The raw dictionary, because it also loads for architectures unknown to transformers.
    config, _ = _load(PretrainedConfig.get_config_dict, model, "config.json")
    if not config:
        raise BoundaryError(f"model directory {model} has no config.json, or an empty one")
    path = str(Path(model).absolute())
    return ModelIdentity(
        names=model_names(path, None, config.get("_name_or_path") or ""),
        architectures=tuple(config.get("architectures") or ()),
        parser=parser,
    )
