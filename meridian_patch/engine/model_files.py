"""Finds the directory of a model on this machine; asks no network and downloads nothing."""

import re
from pathlib import Path

# As the Hugging Face hub names a model: owner/name.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# As its cache names the folder of a model: models--owner--name, with a folder snapshots/COMMIT.
_CACHED = "models--"


def find_model(model: str) -> Path | None:
    """Directory of a model; None if there is none on this machine.

    Args:
        model: a directory, or a name in the Hugging Face cache, such as ``Qwen/Qwen3-8B``.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception:
        # Not cached, no such name, or no Hugging Face library: there is no directory.
        return None


def _is_hub_name(model: str) -> bool:
    """Whether ``owner/name`` is meant for a name on the hub: there is no folder ``owner`` here."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).parent.exists()


def describe_missing(model: str) -> str:
    """The sentence for a model that `find_model` does not find: what is so, expected, and to do."""
    if not _is_hub_name(model):
        return (
            f"model directory {model} does not exist; expected a local directory with config.json "
            "and the tokenizer's files, or a name in the Hugging Face cache"
        )
    return (
        f"model {model} is not in the Hugging Face cache of this machine; expected it there, "
        f"because this command downloads nothing; run 'hf download {model}', or name a directory "
        "with config.json and the tokenizer's files"
    )


def model_name(directory: Path) -> str:
    """Name of a model by its directory: ``owner/name`` in the Hugging Face cache.

    Args:
        directory: from `find_model`; in the cache, a snapshot that is named by its commit.
    """
    if directory.parent.name == "snapshots" and directory.parents[1].name.startswith(_CACHED):
        return directory.parents[1].name.removeprefix(_CACHED).replace("--", "/", 1)
    return directory.name
