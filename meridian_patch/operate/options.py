"""Options that several of these commands take."""

import argparse
from pathlib import Path

from meridian_patch import envs
from meridian_patch.config.key_file import checked_key, read_key
from meridian_patch.operate.http_client import ServerClient, ServerError

_KEY_FILE = "--api-key-file"


def seconds(text: str) -> float:
    """A number of seconds above 0, for argparse.

    Raises:
        ArgumentTypeError: it is none.
        ValueError: it is no number.
    """
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the file of a server's API key."""
    text = "file with the server's API key (default, for localhost: the variable VLLM_API_KEY)"
    parser.add_argument(_KEY_FILE, type=Path, help=text)


def api_key(parsed: argparse.Namespace, url: str | None) -> str | None:
    """The API key for the server at ``url``: of the file, or of vLLM's own variable.

    The variable holds the key of a server here: it goes to localhost alone.

    Raises:
        ConfigError: the file cannot be read, or that or the variable holds no key.
    """
    if parsed.api_key_file is not None or url is None:
        return read_key(parsed.api_key_file, _KEY_FILE)
    try:
        is_local = ServerClient(url).is_local
    except ServerError:
        # The request to it reports the wrong address.
        return None
    key = envs.environment().get("VLLM_API_KEY", "").strip() if is_local else ""
    return checked_key(key, "environment variable VLLM_API_KEY") if key else None
