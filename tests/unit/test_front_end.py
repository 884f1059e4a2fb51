"""vLLM's front end in Rust: what is refused with it, before anything starts."""

import pytest

from meridian_patch.config.load import load_config
from meridian_patch.engine import front_end
from meridian_patch.errors import ConfigError
from meridian_patch.operate.doctor.configuration import check_configuration
from meridian_patch.operate.doctor.finding import State

REFUSED = [
    ("HANDOFF__ROLE", "think", "handoff.role is 'think'"),
    ("HANDOFF__ROLE", "answer", "handoff.role is 'answer'"),
    ("REQUESTS__STOP_SCOPE", "answer", "requests.stop_scope is 'answer'"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_goes_wrong_silently_there_is_refused(name, value, message):
    """With the front end in Python both start."""
    env = {f"MERIDIAN_PATCH_SET_{name}": value}
    config = load_config(env).config
    front_end.check_config(config, env)
    rust = env | {front_end.VARIABLE: "1"}
    with pytest.raises(ConfigError) as refused:
        front_end.check_config(config, rust)
    assert message in str(refused.value)
    assert "unset VLLM_USE_RUST_FRONTEND" in str(refused.value)
    assert all(finding.state is not State.FAIL for finding in check_configuration(env))
    [found] = [each.found for each in check_configuration(rust) if each.state is State.FAIL]
    assert message in found


def test_the_defaults_start_there(monkeypatch):
    monkeypatch.setenv(front_end.VARIABLE, "1")
    front_end.check_config(load_config({}).config, {front_end.VARIABLE: "1"})
    assert front_end.name() == front_end.RUST
    monkeypatch.setenv(front_end.VARIABLE, "0")
    assert front_end.name() == "python"
