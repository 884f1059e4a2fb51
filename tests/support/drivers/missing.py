"""What a test does that lacks something."""

from typing import NoReturn

import pytest

from meridian_patch import envs


def skip_but_in_ci(why: str) -> NoReturn:
    """Skip the test; in continuous integration, which promises what is missing, fail it."""
    if envs.given_environment().get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)
