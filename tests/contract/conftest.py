"""Fixtures of the tests on the real scheduler and KV manager."""

import pytest
import vllm.v1.request as requests
import yaml
from scheduler_driver import engine_config

from meridian_patch.config.family_files import load_families
from meridian_patch.engine.api import exit_summary
from meridian_patch.patching.candidate import MARK


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    """No probe mixes with the requests that a test is about."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__MODE", "off")


@pytest.fixture(autouse=True)
def all_fields(monkeypatch):
    """Requests may set every field of ours; tests of the default take this back."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS", "all")
    exit_summary.allowed_fields.cache_clear()
    yield
    exit_summary.allowed_fields.cache_clear()


@pytest.fixture
def past_the_check(monkeypatch, demo_model):
    """Requests of the test reach the scheduler whatever EngineCore would say of their fields."""
    # The first configuration loads the plug-ins, which may patch this process.
    engine_config(demo_model, is_async=False, blocks=200)
    bound = requests.StructuredOutputRequest
    stock = bound.__base__ if MARK in vars(bound) else bound
    monkeypatch.setattr(requests, "StructuredOutputRequest", stock)


@pytest.fixture
def patience(monkeypatch):
    """A busy test machine must not run into the policy's time budget."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")


@pytest.fixture
def use_family(monkeypatch, tmp_path):
    """Replaces the tiny reasoner's family file by a changed copy."""

    def write(**changes):
        packaged = load_families()["tiny_reasoner"].family.model_dump(exclude_none=True)
        family = {**packaged, "replaces": True, **changes}
        (tmp_path / "tiny_reasoner.yaml").write_text(yaml.safe_dump(plain(family)))
        monkeypatch.setenv("MERIDIAN_PATCH_SET_FAMILIES_DIR", str(tmp_path))

    return write


def plain(value):
    """Tuples as lists: YAML has no others."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
