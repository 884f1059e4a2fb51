"""vLLM's front end in Rust: what is refused with it, before anything starts."""

import pytest

from meridian_patch.config.load import load_config
from meridian_patch.engine import front_end
from meridian_patch.errors import ConfigError

REFUSED = [
    ("HANDOFF__ROLE", "think", "handoff.role is 'think'"),
    ("HANDOFF__ROLE", "answer", "handoff.role is 'answer'"),
    ("REQUESTS__STOP_SCOPE", "answer", "requests.stop_scope is 'answer'"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_goes_wrong_silently_there_is_refused(monkeypatch, name, value, message):
    """With the front end in Python both start."""
    config = load_config({f"MERIDIAN_PATCH_SET_{name}": value}).config
    front_end.check_config(config)
    monkeypatch.setenv(front_end.VARIABLE, "1")
    with pytest.raises(ConfigError) as refused:
        front_end.check_config(config)
    assert message in str(refused.value)
    assert "unset VLLM_USE_RUST_FRONTEND" in str(refused.value)


def test_the_defaults_start_there(monkeypatch):
    monkeypatch.setenv(front_end.VARIABLE, "1")
    front_end.check_config(load_config({}).config)
    assert front_end.name() == front_end.RUST
    monkeypatch.setenv(front_end.VARIABLE, "0")
    assert front_end.name() == "python"
