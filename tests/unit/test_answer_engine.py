"""What an answer engine must have in common with its think engine, by their pages."""

import json

import pytest

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.answer_engine import (
    METRICS,
    MODELS,
    TOKENS,
    VERSION,
    Same,
    compare,
    key_of,
    same_in,
    served_name,
    tls_of,
)

SAME = Same("0.32.0", "16", "auto", ("tiny",), 1024)
CARD = {"id": "m", "root": "tiny", "parent": None, "max_model_len": 1024}
ADAPTER = {"id": "a", "root": "/adapters/a", "parent": "m", "max_model_len": None}
# As vLLM writes it: other labels end in the same words.
CACHE = (
    '# HELP x\nvllm:cache_config_info{_block_size_resolved="True",block_size="16",'
    'cache_dtype="auto",mamba_ssm_cache_dtype="bf16"} 1.0\n'
)


def pages(**changed):
    found = {
        "version": (200, json.dumps({"version": "0.32.0"})),
        "models": (200, json.dumps({"data": [ADAPTER, CARD]})),
        "metrics": (200, CACHE),
        "tokens": (200, '{"choices": [{"token_ids": [5]}]}'),
        **changed,
    }
    return dict(zip((VERSION, MODELS, METRICS, TOKENS), found.values(), strict=True))


def why(**changed):
    return next((fact.why for fact in compare(SAME, pages(**changed)) if fact.expected), None)


def test_a_think_servers_pages_say_what_its_answer_engines_need():
    assert same_in(pages()) == SAME
    assert why() is None
    assert served_name(SAME, pages()) == "m"
    facts = {fact.name: fact.found for fact in compare(SAME, pages())}
    assert facts["block_size"] == "'16'"
    assert facts["token endpoint"] == TOKENS


@pytest.mark.parametrize(
    ("changed", "said"),
    (
        ({"version": (404, "<html>")}, "its /version is HTTP 404 '<html>', expected a vLLM server"),
        ({"version": (200, "[1]")}, "its /version is HTTP 200 '[1]', expected a vLLM server's"),
        ({"models": (401, "no")}, "its reply to the key is HTTP 401 'no', expected its own --api"),
        ({"models": (200, '{"data": 5}')}, "its model is none, expected 'tiny' as at the think"),
        ({"metrics": (200, "")}, "its block_size is 'not in /metrics', expected '16' as at"),
        ({"tokens": (404, "")}, "its token endpoint is not there, expected /inference/v1/generate"),
        ({"tokens": (403, "")}, "its token endpoint is not there, expected /inference/v1/generate"),
        ({"tokens": (500, "dead")}, "its token endpoint is HTTP 500 'dead', expected a token"),
        ({"tokens": (200, "{}")}, "its token endpoint is HTTP 200 '{}', expected a token"),
    ),
)
def test_one_sentence_says_why_an_engine_is_not_used(changed, said):
    assert why(**changed).startswith(said)


@pytest.mark.parametrize("name", ("version", "models", "metrics"))
def test_pages_that_lack_a_part(name):
    assert same_in(pages(**{name: (200, "{}")})) is None


def test_offline_a_model_is_the_folder_of_its_name():
    same = SAME._replace(models=("/hub/models--Qwen--Qwen3-8B/snapshots/abc",))
    assert same.has_model("Qwen/Qwen3-8B")
    assert not same.has_model("Qwen/Qwen3-4B")


def test_files_that_hold_no_key_and_no_certificates(tmp_path):
    """Each is named, and nothing of the key is quoted."""
    file = tmp_path / "file"
    file.write_text("secret\nsecond\n")
    config = HandoffConfig(api_key_file=file, ca_file=file)
    with pytest.raises(ConfigError, match=r"handoff\.api_key_file .*file must hold one") as raised:
        key_of(config)
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"handoff\.ca_file .*expected certificates in PEM"):
        tls_of(config)
    assert (key_of(HandoffConfig()), tls_of(HandoffConfig())) == (None, None)
