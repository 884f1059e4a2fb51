"""Reads a file that holds a server's API key."""

from pathlib import Path

from meridian_patch.errors import ConfigError


def read_key(path: Path | None, name: str) -> str | None:
    """The API key that a file holds; None for no file.

    Args:
        path: the file.
        name: the option or the key of the configuration that names it.

    Raises:
        ConfigError: the file cannot be read, or holds no key in one line of printable ASCII.
    """
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        # Its text quotes a byte of the file, so it is not the cause that a traceback shows.
        key = ""
    return checked_key(key, f"{name} {path}")


def checked_key(key: str, name: str) -> str:
    """The key, which no message quotes.

    Raises:
        ConfigError: it is not one line of printable ASCII.
    """
    if not (key and key.isascii() and key.isprintable()):
        raise ConfigError(f"{name} must hold one key: one line of printable ASCII characters")
    return key
