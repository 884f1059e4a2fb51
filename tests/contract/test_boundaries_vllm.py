"""Boundaries as resolved from a real VllmConfig, and what vLLM's parsers say about the families."""

import json
import logging

import pytest
from vllm.config.reasoning import ReasoningConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.reasoning import ReasoningParserManager

from meridian_patch.config.family_files import load_families
from meridian_patch.config.load import load_config
from meridian_patch.config.matching import FamilyMatch
from meridian_patch.demo.tokenizer import build_tokenizer, save_tokenizer
from meridian_patch.engine.boundaries import model_names, resolve_boundaries
from meridian_patch.errors import BoundaryError, ConfigError
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.markers import ServerStrings, choose_markers
from meridian_patch.phase.matcher import BoundaryMatcher, Event

THINK_START, THINK_END = 256, 257
FAMILIES = load_families()
PARSERS = [(name, parser) for name, file in FAMILIES.items() for parser in file.family.parsers]
# Tokens beside the markers without which a parser cannot be built.
PARSER_TOKENS = {
    "mistral": ["[TOOL_CALLS]"],
    "olmo3": ["Ġ</", "</", "think", ">", "<", "Ġ<"],
}
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    """Model directories without weights: one by name, one that no family file knows."""
    root = tmp_path_factory.mktemp("models")
    architectures = {"tiny-reasoner": "Qwen3ForCausalLM", "plain": "LlamaForCausalLM"}
    for name, architecture in architectures.items():
        directory = root / name
        directory.mkdir()
        save_tokenizer(directory)
        kind = "qwen3" if architecture.startswith("Qwen3") else "llama"
        config = {**CONFIG, "model_type": kind, "architectures": [architecture]}
        (directory / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
def config_for(model_dirs):
    """A VllmConfig for one of the directories."""

    def build(name, **engine_args):
        settings = {"model": str(model_dirs / name), "max_model_len": 256, "dtype": "float32"}
        return EngineArgs(**settings, **engine_args).create_engine_config()

    return build


@pytest.fixture
def log(monkeypatch, caplog):
    """Our records; vLLM's logger does not hand them on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.meridian_patch")
    return lambda: [r for r in caplog.records if r.name == "vllm.meridian_patch"]


def test_named_model(config_for, log):
    """The tiny reasoner is found by its directory's name, without a word in the log."""
    boundaries = resolve_boundaries(config_for("tiny-reasoner"), load_config({}))
    assert boundaries == Boundaries(
        "tiny_reasoner",
        ((THINK_START,),),
        ((THINK_END,),),
        (THINK_END,),
        history="strip",
        turn_start=frozenset(b_ids("<|system|><|user|><|assistant|>")),
        probe=(THINK_END,),
    )
    assert log() == []


def test_served_name(config_for):
    """A served name finds the family of a directory with another name."""
    config = config_for("plain", served_model_name="my/tiny-reasoner")
    assert resolve_boundaries(config, load_config({})).family == "tiny_reasoner"


def test_reasoning_parser(config_for):
    """--reasoning-parser gives markers to a model that no file knows."""
    config = config_for("plain", reasoning_parser="step3")
    boundaries = resolve_boundaries(config, load_config({}))
    assert (boundaries.start, boundaries.end) == (((THINK_START,),), ((THINK_END,),))


def test_a_marker_in_a_users_text_is_no_boundary(config_for):
    """Where only a parser is known, the chat template tells where the model's turn begins."""
    config = config_for("plain", reasoning_parser="step3")
    tokenizer = build_tokenizer()
    matcher = BoundaryMatcher(resolve_boundaries(config, load_config({})))
    for text in ("what is <think>?", "what is </think>?"):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        opened = len(prompt) - prompt[::-1].index(THINK_START) - 1
        assert matcher.last_boundary(prompt)[0] is Event.START
        assert matcher.last_boundary(prompt[:opened])[0] is Event.NONE


def test_parser_without_strings_takes_them_from_its_family(config_for):
    """A parser that keeps its markers to itself leads to the family that names it."""
    config = config_for("plain", reasoning_parser="granite")
    boundaries = resolve_boundaries(config, load_config({}))
    assert boundaries.family == "granite_32"
    assert len(boundaries.start) == 2


def test_reasoning_config(config_for):
    """The strings of --reasoning-config count, and its end string is what is forced."""
    config = config_for(
        "plain",
        reasoning_config=ReasoningConfig(
            reasoning_start_str="<think>", reasoning_end_str="So.</think>"
        ),
        reasoning_parser="step3",
    )
    boundaries = resolve_boundaries(config, load_config({}))
    assert boundaries.end == ((THINK_END,),)
    assert boundaries.close == (*b_ids("So."), THINK_END)


def b_ids(text):
    return build_tokenizer().encode(text, add_special_tokens=False)


def test_parser_that_disagrees_is_refused(config_for):
    """A parser for other markers than the model's family has stops the engine."""
    config = config_for("tiny-reasoner", reasoning_config=ReasoningConfig("", "[THINK]", "[/T]"))
    with pytest.raises(BoundaryError, match=r"'\[THINK\]'"):
        resolve_boundaries(config, load_config({}))


def test_forced_family(config_for):
    """`family:` counts for any model; a family of another vocabulary is refused."""
    config = config_for("plain")
    env = {"MERIDIAN_PATCH_SET_FAMILY": "tiny_reasoner"}
    assert resolve_boundaries(config, load_config(env)).family == "tiny_reasoner"
    with pytest.raises(BoundaryError) as error:
        resolve_boundaries(config, load_config({"MERIDIAN_PATCH_SET_FAMILY": "qwen3_hybrid"}))
    for part in (config.model_config.model, "qwen3_hybrid.yaml", "[256]", "[151667]"):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="env MERIDIAN_PATCH_SET_FAMILY: family is 'none'"):
        resolve_boundaries(config, load_config({"MERIDIAN_PATCH_SET_FAMILY": "none"}))


def test_unknown_model_is_single_phase_with_one_warning(config_for, log):
    """No family and no parser: one warning that says how to change it."""
    config = config_for("plain")
    assert resolve_boundaries(config, load_config({})) is None
    (record,) = log()
    assert record.levelno == logging.WARNING
    for part in (config.model_config.model, "LlamaForCausalLM", "--reasoning-parser", "family:"):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("engine_args", "reason"),
    [({"skip_tokenizer_init": True}, "--skip-tokenizer-init"), ({"runner": "pooling"}, "pooling")],
)
def test_models_without_phases(config_for, log, engine_args, reason):
    """What has no tokenizer or generates no text is single-phase, and the log says why."""
    config = config_for("tiny-reasoner", **engine_args)
    assert resolve_boundaries(config, load_config({})) is None
    (record,) = log()
    assert record.levelno == logging.INFO
    assert reason in record.getMessage()


@pytest.mark.parametrize(("family", "parser"), PARSERS)
def test_parser_of_a_family(family, parser):
    """Each parser that a family file names exists in vLLM and agrees with the file."""
    file = FAMILIES[family]
    tokenizer = build_tokenizer()
    markers = [text for pair in file.family.pairs for text in pair]
    tokenizer.add_tokens([*markers, *file.family.implicit_end, *PARSER_TOKENS.get(parser, ())])
    built = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer)
    server = ServerStrings(parser, built.reasoning_start_str or "", built.reasoning_end_str or "")
    match = FamilyMatch(family, file.family, str(file.path), "name", parser)
    assert choose_markers("m", match, server).match is match


@pytest.mark.parametrize(
    ("model", "served", "own", "expected"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B", ("Qwen3-8B",)),
        ("/models/x/", "b/c", "", ("x", "c")),
        (
            "/hub/models--Qwen--Qwen3-8B/snapshots/0a1b",
            "gpt",
            "",
            ("0a1b", "models--Qwen--Qwen3-8B", "gpt"),
        ),
    ],
)
def test_model_names(model, served, own, expected):
    """A model goes by path, cache folder, served names and its own name, each once."""
    assert model_names(model, served, own) == expected
