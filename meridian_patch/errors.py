"""Everything meridian_patch raises on purpose.

::

    MeridianError
    ├── ConfigError          a value in YAML, the environment or a request is wrong
    ├── BoundaryError        a think boundary cannot be resolved for the served model
    ├── CalibrationError     a labelled set cannot carry the bound that was asked for
    ├── PatchRefused         the engine must not start patched: version, contract or conflict
    └── BenchError           a benchmark or the demo cannot go on

Each message says what happened, what was expected and what to do.
"""

__all__ = [
    "BenchError",
    "BoundaryError",
    "CalibrationError",
    "ConfigError",
    "MeridianError",
    "PatchRefused",
]


class MeridianError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(MeridianError):
    """A configured value is wrong; the message names the field and where it came from."""


class BoundaryError(MeridianError):
    """A think boundary cannot be resolved; the message names model, file, field, string, ids."""


class CalibrationError(MeridianError):
    """Nothing can be calibrated: the message says what is wrong, or missing, and what would do."""


class PatchRefused(MeridianError):  # noqa: N818 - the name is what happened
    """The engine must not start patched; the message says what differs and how to switch off."""


class BenchError(MeridianError):
    """A benchmark or the demo cannot go on."""
