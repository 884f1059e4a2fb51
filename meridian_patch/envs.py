"""The only place that reads the process environment.

================================= ===============================================================
``MERIDIAN_PATCH``                ``1`` active, ``0`` inactive whatever else is set
``MERIDIAN_PATCH_MODE``           ``strict`` (default): refuse to start on a mismatch;
                                  ``lenient``: run stock and say so
``MERIDIAN_PATCH_CONFIG``         path of a configuration file
``MERIDIAN_PATCH_SET_*``          one configuration value, e.g.
                                  ``MERIDIAN_PATCH_SET_POLICY__NAME=noop``
``MERIDIAN_PATCH_ASSUME_VLLM``    version to assume for a source build of vLLM
``MERIDIAN_PATCH_STATUS_DIR``     where processes write what is live in them
``MERIDIAN_PATCH_EMULATE``        cost model of the device that an emulated worker stands for
``MERIDIAN_PATCH_EMULATE_TOKENS`` tokens that one token of the served model stands for there
``MERIDIAN_PATCH_EMULATE_REPORT`` file in which that worker says how late it was
``XDG_RUNTIME_DIR``               the user's runtime directory; status goes there when it is set
``VLLM_API_KEY``                  vLLM's own: its server's API key
``VLLM_PLUGINS``                  vLLM's own list of plugins to load
``VLLM_USE_RUST_FRONTEND``        vLLM's own: its front end is the one in Rust
``VLLM_RUST_FRONTEND_PATH``       vLLM's own: where that is; empty: none
================================= ===============================================================
"""

import difflib
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meridian_patch.errors import ConfigError

PREFIX = "MERIDIAN_PATCH"
OVERRIDE_PREFIX = "MERIDIAN_PATCH_SET_"
PLUGIN_NAME = "meridian_patch"
EMULATE = "MERIDIAN_PATCH_EMULATE"
EMULATE_TOKENS = "MERIDIAN_PATCH_EMULATE_TOKENS"
EMULATE_REPORT = "MERIDIAN_PATCH_EMULATE_REPORT"
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
KNOWN = (
    "MERIDIAN_PATCH",
    "MERIDIAN_PATCH_MODE",
    "MERIDIAN_PATCH_CONFIG",
    "MERIDIAN_PATCH_ASSUME_VLLM",
    "MERIDIAN_PATCH_STATUS_DIR",
    EMULATE,
    EMULATE_TOKENS,
    EMULATE_REPORT,
)

logger = logging.getLogger("vllm.meridian_patch")

# What was set here replaced, by name; None: the variable was unset.
_replaced: dict[str, str | None] = {}

# Kubernetes sets these in every container for each service of its namespace, here for one whose
# name begins with `meridian-patch`; the value has a shape of its own too.
# Load-bearing: kubernetes/pkg/kubelet/envvars/envvars.go, "service links".
_ADDRESS = r"[0-9A-Fa-f.:]+"
_URL = r"(tcp|udp|sctp)://\S+:\d+"
_SERVICE_LINKS = tuple(
    (re.compile(rf"{PREFIX}[A-Z0-9_]*?_{name}"), re.compile(value))
    for name, value in (
        (r"SERVICE_HOST", _ADDRESS),
        (r"SERVICE_PORT(_[A-Z0-9_]+)?", r"\d+"),
        (r"PORT(_\d+_(TCP|UDP|SCTP))?", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_ADDR", _ADDRESS),
    )
)


def environment() -> Mapping[str, str]:
    """The process environment, read only."""
    return os.environ  # noqa: TID251


def given_environment() -> dict[str, str]:
    """The environment as the user gave it, without what `activate_children` changed."""
    env = dict(environment())
    for name, value in _replaced.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def check_names(env: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable with our prefix that nothing reads, or that is empty.

    Those that Kubernetes sets for a service named like us are ignored. One that sets a
    configuration value may be empty: it is YAML's null.
    """
    for name, value in env.items():
        if name in KNOWN and not value:
            raise ConfigError(
                f"environment variable {name} is empty, expected a value; unset it for the default"
            )
        if not name.startswith(PREFIX) or name in KNOWN or name.startswith(OVERRIDE_PREFIX):
            continue
        if _is_service_link(name, value):
            logger.debug("meridian_patch: %s is a Kubernetes service link, ignored", name)
            continue
        close = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KNOWN)}"
        raise ConfigError(f"environment variable {name} is not read by meridian_patch; {hint}")


def _is_service_link(name: str, value: str) -> bool:
    return any(
        names.fullmatch(name) and values.fullmatch(value) for names, values in _SERVICE_LINKS
    )


def activation(env: Mapping[str, str]) -> bool | None:
    """What ``MERIDIAN_PATCH`` says: True, False, or None when it is unset."""
    value = env.get("MERIDIAN_PATCH")
    if value is None:
        return None
    if value not in {"0", "1"}:
        raise ConfigError(f"environment variable MERIDIAN_PATCH is {value!r}, expected 0 or 1")
    return value == "1"


def plugin_names(env: Mapping[str, str]) -> list[str] | None:
    """The names in ``VLLM_PLUGINS``, or None when it is unset."""
    value = env.get("VLLM_PLUGINS")
    return None if value is None else [name.strip() for name in value.split(",")]


def has_rust_front_end(env: Mapping[str, str]) -> bool:
    """True where ``vllm serve`` starts its front end in Rust."""
    try:
        is_asked = bool(int(env.get(RUST_FRONT_END, "0")))
    except ValueError:
        # vLLM refuses to start.
        return False
    return is_asked and env.get("VLLM_RUST_FRONTEND_PATH", "auto") != ""


def is_strict(env: Mapping[str, str]) -> bool:
    """True unless ``MERIDIAN_PATCH_MODE=lenient``."""
    value = env.get("MERIDIAN_PATCH_MODE", "strict")
    if value not in {"strict", "lenient"}:
        raise ConfigError(
            f"environment variable MERIDIAN_PATCH_MODE is {value!r}, expected strict or lenient"
        )
    return value == "strict"


def config_path(env: Mapping[str, str]) -> Path | None:
    value = env.get("MERIDIAN_PATCH_CONFIG")
    return None if value is None else Path(value)


def config_overrides(env: Mapping[str, str]) -> dict[tuple[str, ...], tuple[str, str]]:
    """Configuration values set in the environment.

    Returns:
        ``{("policy", "name"): ("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")}``: key path to
        variable name and text.

    Raises:
        ConfigError: two variables set one value, because only the case of their names differs.
    """
    overrides: dict[tuple[str, ...], tuple[str, str]] = {}
    for name, value in sorted(env.items()):
        if name.startswith(OVERRIDE_PREFIX):
            path = tuple(name.removeprefix(OVERRIDE_PREFIX).lower().split("__"))
            if path in overrides:
                raise ConfigError(
                    f"environment variables {overrides[path][0]} and {name} set the same value, "
                    "expected one of them; unset the other"
                )
            overrides[path] = (name, value)
    return overrides


def assumed_vllm_version(env: Mapping[str, str]) -> str | None:
    return env.get("MERIDIAN_PATCH_ASSUME_VLLM")


def emulated_device(env: Mapping[str, str]) -> tuple[str | None, str]:
    """Cost model of the emulated device, and how many tokens one token stands for there."""
    return env.get(EMULATE), env.get(EMULATE_TOKENS, "1")


def emulation_report(env: Mapping[str, str]) -> Path | None:
    """The file in which an emulated device says how late it was."""
    value = env.get(EMULATE_REPORT)
    return Path(value) if value else None


def status_directories(env: Mapping[str, str]) -> tuple[Path, ...]:
    """Where processes write what is live in them, the preferred directory first.

    ``MERIDIAN_PATCH_STATUS_DIR`` alone where it is set. Otherwise a directory in the user's
    runtime directory (``XDG_RUNTIME_DIR``), then one per user in the temporary directory. A
    server may have started without the first, so readers look into both.

    Raises:
        OSError: the system has no temporary directory.
    """
    value = env.get("MERIDIAN_PATCH_STATUS_DIR")
    if value:
        return (Path(value),)
    temporary = Path(tempfile.gettempdir()) / f"meridian_patch-{os.getuid()}"
    runtime = Path(env.get("XDG_RUNTIME_DIR") or "")
    if runtime.is_absolute() and _is_own(runtime):
        return runtime / "meridian_patch", temporary
    return (temporary,)


def _is_own(directory: Path) -> bool:
    # A shell that `su` started keeps the variable of the user before.
    try:
        return directory.stat().st_uid == os.getuid()
    except OSError:
        return False


def activate_children() -> None:
    """Make this process and its children active, whatever ``VLLM_PLUGINS`` lists."""
    _set("MERIDIAN_PATCH", "1")
    load_in_children()


def load_in_children() -> None:
    """Let vLLM load the plug-in in this process and its children, if it leaves plug-ins out."""
    names = plugin_names(environment())
    if names is not None and PLUGIN_NAME not in names:
        _set("VLLM_PLUGINS", ",".join([*names, PLUGIN_NAME]))


def set_for_children(values: Mapping[str, str]) -> None:
    """Set variables in this process and its children."""
    for name, value in values.items():
        _set(name, value)


def _set(name: str, value: str) -> None:
    _replaced.setdefault(name, os.environ.get(name))  # noqa: TID251
    os.environ[name] = value  # noqa: TID251
