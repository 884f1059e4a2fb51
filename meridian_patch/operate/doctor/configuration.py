"""Judges the configuration: names, values, and which source of a value wins."""

from collections.abc import Iterator, Mapping
from typing import Any

from meridian_patch import envs
from meridian_patch.config.load import LoadedConfig, load_config
from meridian_patch.engine import front_end
from meridian_patch.errors import ConfigError
from meridian_patch.operate.doctor.finding import Area, Finding

AREA = Area("configuration")
_HOW = "meridian config shows every key; docs/configuration.md has types and bounds"


def check_configuration(env: Mapping[str, str]) -> Iterator[Finding]:
    """Names and values of all sources.

    Args:
        env: the environment as the user gave it.
    """
    wrong = list(_wrong_names(env))
    yield from wrong
    if not wrong:
        yield AREA.ok("names of variables", f"{_num_ours(env)} of ours, all known")
    yield _mode(env)
    yield from _values({name: value for name, value in env.items() if not _is_wrong(name, value)})


def _wrong_names(env: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in sorted(env.items()):
        message = _is_wrong(name, value)
        if message:
            found, _, hint = message.partition("; ")
            guess = hint.removeprefix("did you mean ").rstrip("?")
            is_guess = hint.startswith("did you mean")
            yield AREA.fail(
                "names of variables",
                found,
                expected=guess if is_guess else hint,
                fix=f"write {guess}, or unset {name}" if is_guess else f"unset {name}",
            )


def _is_wrong(name: str, value: str) -> str | None:
    try:
        envs.check_names({name: value})
    except ConfigError as error:
        return str(error)
    return None


def _num_ours(env: Mapping[str, str]) -> int:
    return sum(name.startswith(envs.PREFIX) for name in env)


def _mode(env: Mapping[str, str]) -> Finding:
    try:
        is_strict = envs.is_strict(env)
    except ConfigError as error:
        return AREA.fail(
            "mode",
            str(error),
            expected="strict or lenient",
            fix="unset MERIDIAN_PATCH_MODE, or write strict or lenient",
        )
    if is_strict:
        return AREA.ok("mode", "strict: a mismatch with vLLM stops the start")
    return AREA.warn(
        "mode",
        "lenient: a mismatch with vLLM serves stock, and only the log says so",
        expected="strict",
        fix="unset MERIDIAN_PATCH_MODE",
    )


def _values(env: Mapping[str, str]) -> Iterator[Finding]:
    path = envs.config_path(env)
    try:
        loaded = load_config(env)
        without = load_config(_without_overrides(env))
        front_end.check_config(loaded.config, env)
    except ConfigError as error:
        where = f"file {path} and variables" if path else "variables"
        yield AREA.fail("values", str(error), expected=f"{where} that load", fix=_HOW)
        return
    told = [
        _origin(key, value, origin, without)
        for key, value, origin in loaded.rows()
        if origin != "default" and key != "version"
    ]
    source = f"file {path}" if path else "no file"
    yield AREA.ok("values", f"{source}; digest {loaded.digest}; set: {', '.join(told) or 'none'}")


def _origin(key: str, value: Any, origin: str, without: LoadedConfig) -> str:
    """A value, where it is from, and what it wins over."""
    text = f"{key}={value} ({origin}"
    below = without.origins.get(key, "default")
    if origin.startswith("env ") and below != "default":
        text += f", wins over {below}"
    return text + ")"


def _without_overrides(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(envs.OVERRIDE_PREFIX)}
