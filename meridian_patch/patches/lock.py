"""The vLLM releases that the patches are for, and what was recorded of each of them."""

import json
from importlib import resources
from typing import Final, cast

from meridian_patch.patching.lock import Entry

SUPPORTED: Final = ">=0.32,<0.34"
LOCK_FILE: Final = "upstream_lock.json"


def load_lock() -> dict[str, Entry]:
    """What the contracts met in each checked vLLM release, by release."""
    text = resources.files(__package__).joinpath(LOCK_FILE).read_text(encoding="utf-8")
    return cast("dict[str, Entry]", json.loads(text))


LOCKED_VERSIONS: Final = tuple(load_lock())
