"""Family files: the packaged ones, an operator's own, and which one fits a model."""

import pytest

from meridian_patch.config.family_files import (
    exit_config,
    get_family,
    load_families,
    packaged_directory,
)
from meridian_patch.config.matching import ModelIdentity, match_family
from meridian_patch.config.schema import Config, ExitConfig
from meridian_patch.errors import ConfigError

PACKAGED = load_families()
FAMILY = """\
version: 1
family: {family}
match:
  names: ["*{glob}*"]
  architectures: [{architecture}]
parsers: [{parser}]
start: "{start}"
end: "</t>"
documented_ids: {{provenance: unverified, source: a test}}
prompt_start: think
history: {history}
history_evidence: {{source: a test, provenance: unverified}}
"""
DEFAULTS = {
    "glob": "none-such",
    "architecture": "NoneSuchForCausalLM",
    "parser": "none_such",
    "start": "<t>",
    "history": "strip",
}


def family_text(family, extra="", **values):
    return FAMILY.format(family=family, **{**DEFAULTS, **values}) + extra


@pytest.fixture
def own(tmp_path):
    """Writes an operator's family files, by file name, and returns their directory."""

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    return write


def error_of(directory):
    with pytest.raises(ConfigError) as error:
        load_families(directory)
    return str(error.value)


def named(*names, architectures=(), parser=None):
    return ModelIdentity(names, architectures, parser)


def test_packaged_families_load():
    """Every packaged file is valid, is loaded under its own name, and replaces nothing."""
    stems = {path.stem for path in packaged_directory().glob("*.yaml")}
    assert set(PACKAGED) == stems
    assert len(stems) >= 44
    assert not any(file.family.replaces for file in PACKAGED.values())


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_family_is_told_apart(name):
    """No name glob of one packaged file is as long as another's for the name it describes."""
    for glob in PACKAGED[name].family.match.names:
        example = glob.strip("*").replace("*", "x")
        assert match_family(PACKAGED, named(example)).family.family == name


def test_verified_ids_come_with_a_tokenizer_as_source():
    """`verified` means that a tokenizer was read: such files carry ids for both markers."""
    for file in PACKAGED.values():
        documented = file.family.documented_ids
        if documented.provenance == "verified":
            assert documented.start, file.path
            assert documented.end, file.path


def test_known_history_comes_with_what_shows_it():
    """A line that was read has a source; a rule that came without one says so."""
    for file in PACKAGED.values():
        evidence = file.family.history_evidence
        if file.family.history == "unverified":
            assert evidence is None, file.path
        else:
            assert evidence.source, file.path
            assert bool(evidence.line) == (evidence.provenance != "unverified"), file.path


def test_packaged_tool_loops_can_be_seen():
    """Without a tool-call marker the rule could not be followed."""
    for file in PACKAGED.values():
        if file.family.history == "keep_in_tool_loop":
            assert file.family.tool_call, file.path


def test_tool_call_is_optional(own):
    """A family without a tool-call marker is valid: its outputs are kept as stock does."""
    directory = own(mine=family_text("mine", history="keep_in_tool_loop"))
    assert load_families(directory)["mine"].family.tool_call == ()
    own(mine=family_text("mine", 'tool_call: ["<call>", "<calls>"]\n'))
    assert load_families(directory)["mine"].family.tool_call == ("<call>", "<calls>")


def test_early_exit_of_a_family(own):
    """It counts where the configuration is silent; a family without any changes nothing."""
    directory = own(mine=family_text("mine", "exit: {mode: enforce, min_think_tokens: 40}\n"))
    config = Config(version=1, families_dir=directory, exit=ExitConfig(mode="observe"))
    merged = exit_config(config, "mine")
    assert (merged.mode, merged.min_think_tokens) == ("observe", 40)
    assert exit_config(config, "qwen3") == exit_config(config, "<parser x>") == config.exit


def test_early_exit_that_contradicts_the_configuration(own):
    """Each is right alone; the error names both."""
    directory = own(mine=family_text("mine", "exit: {min_think_tokens: 40}\n"))
    config = Config(version=1, families_dir=directory, exit=ExitConfig(max_think_tokens=30))
    with pytest.raises(ConfigError, match=r"mine\.yaml.*min_think_tokens \(40\)"):
        exit_config(config, "mine")


def test_own_file_needs_no_evidence(own):
    """Who writes a family file knows the template; only packaged files must show it."""
    evidence = "history_evidence: {source: a test, provenance: unverified}\n"
    family = load_families(own(mine=family_text("mine").replace(evidence, "")))["mine"].family
    assert family.history_evidence is None
    assert family.history == "strip"


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("DeepSeek-R1", "deepseek_r1"),
        ("DeepSeek-R1-0528", "deepseek_r1"),
        ("DeepSeek-R1-0528-Qwen3-8B", "r1_0528_qwen3_8b"),
        ("DeepSeek-R1-Distill-Qwen-7B", "r1_distill_qwen"),
        ("DeepSeek-R1-Distill-Llama-8B", "r1_distill_llama"),
        ("DeepSeek-V3.1", "deepseek_v31"),
        ("DeepSeek-V3.2-Exp", "deepseek_v32"),
        ("Qwen3-8B", "qwen3_hybrid"),
        ("Qwen3-30B-A3B-Thinking-2507", "qwen3_thinking_2507"),
        ("Qwen3-Next-80B-A3B-Thinking", "qwen3_next_thinking"),
        ("Qwen3.5-397B-A17B", "qwen35_36"),
        ("Qwen3.6-35B-A3B", "qwen35_36"),
        ("Qwen3.8-27B", "qwen38"),
        ("QwQ-32B", "qwq_32b"),
        ("gpt-oss-20b", "gpt_oss"),
        ("GLM-4.5-Air", "glm45_46"),
        ("GLM-4.7", "glm47"),
        ("Kimi-K2-Thinking", "kimi_k2_thinking"),
        ("MiniMax-M2", "minimax_m2"),
        ("Magistral-Small-2506", "magistral_2506"),
        ("Magistral-Small-2509", "mistral_v13plus"),
        ("Seed-OSS-36B-Instruct", "seed_oss"),
        ("Olmo-3-32B-Think", "olmo3_think"),
        ("NVIDIA-Nemotron-Nano-9B-v2", "nemotron_nano_v2"),
        ("Llama-3_1-Nemotron-Nano-8B-v1", "llama_nemotron"),
        ("Phi-4-mini-reasoning", "phi4_reasoning"),
        ("step3", "step3"),
        ("tiny-reasoner", "tiny_reasoner"),
    ],
)
def test_well_known_names(model, family):
    """Models go by the name they were published under, whatever the case."""
    for name in (model, model.lower()):
        match = match_family(PACKAGED, named(name))
        assert (match.label, match.how) == (family, "name")


def test_model_without_family():
    """A model that no file knows has no family."""
    model = named("Llama-3.1-8B-Instruct", architectures=("LlamaForCausalLM",))
    assert match_family(PACKAGED, model) is None


def test_longest_glob_of_any_name_wins():
    """A served name does not hide the more exact name of the path."""
    match = match_family(PACKAGED, named("deepseek-r1", "DeepSeek-R1-Distill-Qwen-7B"))
    assert match.label == "r1_distill_qwen"


def test_name_beats_architecture(own):
    """A name is a better witness than an architecture."""
    directory = own(
        one=family_text("one", glob="my-model"), two=family_text("two", architecture="MineLM")
    )
    families = load_families(directory)
    assert match_family(families, named("my-model", architectures=("MineLM",))).label == "one"
    assert match_family(families, named("x", architectures=("MineLM",))).label == "two"


def test_architecture_beats_parser(own):
    """A parser serves many families, so it is asked last."""
    directory = own(
        one=family_text("one", parser="mine"), two=family_text("two", architecture="MineLM")
    )
    families = load_families(directory)
    model = named("x", architectures=("MineLM",), parser="mine")
    assert match_family(families, model).label == "two"
    match = match_family(families, named("x", parser="mine"))
    assert (match.label, match.how) == ("one", "parser")


def test_architecture_of_agreeing_families(own):
    """Families that agree on the markers count together, for what they agree on."""
    directory = own(
        one=family_text("one", architecture="MineLM"),
        two=family_text("two", architecture="MineLM", history="keep"),
    )
    match = match_family(load_families(directory), named("x", architectures=("MineLM",)))
    assert match.label == "<architecture MineLM>"
    assert match.family.pairs == (("<t>", "</t>"),)
    assert match.family.history == "unverified"
    assert match.family.prompt_start == "think"
    assert match.family.documented_ids.provenance == "unverified"
    assert "one.yaml" in match.files
    assert "two.yaml" in match.files


def test_what_ends_thoughts_of_agreeing_families_is_joined(own):
    """A tool call must not be closed as a thought, and a user's words must not open one."""
    directory = own(
        one=family_text(
            "one", 'implicit_end: ["<a>"]\nturn_start: ["<u>"]\n', architecture="MineLM"
        ),
        two=family_text("two", 'implicit_end: ["<b>", "<a>"]\n', architecture="MineLM"),
    )
    family = match_family(load_families(directory), named("x", architectures=("MineLM",))).family
    assert family.implicit_end == ("<a>", "<b>")
    assert family.turn_start == ("<u>",)


def test_architecture_of_disagreeing_families(own):
    """Different markers for one architecture decide nothing."""
    directory = own(
        one=family_text("one", architecture="MineLM"),
        two=family_text("two", architecture="MineLM", start="<think>"),
    )
    assert match_family(load_families(directory), named("x", architectures=("MineLM",))) is None


def test_tie_names_both_families(own):
    """Two globs of equal length cannot be told apart: the operator decides."""
    directory = own(one=family_text("one", glob="mine-7b"), two=family_text("two", glob="my-mine"))
    with pytest.raises(ConfigError) as error:
        match_family(load_families(directory), named("my-mine-7b"))
    for part in ("my-mine-7b", "one and two", "one.yaml", "two.yaml", "set 'family:'"):
        assert part in str(error.value)


def test_unknown_family_name():
    """A forced family that does not exist names its origin and the close match."""
    with pytest.raises(ConfigError) as error:
        get_family(PACKAGED, "qwen3_hybird", "file c.yaml")
    for part in ("file c.yaml: family is 'qwen3_hybird'", "did you mean qwen3_hybrid?"):
        assert part in str(error.value)


def test_own_family_is_added(own):
    """A directory adds families, and what is no YAML file in it is left alone."""
    directory = own(mine=family_text("mine"))
    (directory / "README.md").write_text("notes")
    assert set(load_families(directory)) == {*PACKAGED, "mine"}


def test_replacement_needs_to_be_said(own):
    """A second file for a packaged family is an error unless it says that it replaces it."""
    directory = own(gpt_oss=family_text("gpt_oss"))
    message = error_of(directory)
    for part in ("two files for family 'gpt_oss'", str(directory), "replaces: true"):
        assert part in message
    own(gpt_oss=family_text("gpt_oss", "replaces: true\n"))
    assert load_families(directory)["gpt_oss"].family.start == "<t>"


def test_replacement_of_nothing(own):
    """A misspelled replacement would leave the packaged file in use."""
    message = error_of(own(gpt_os=family_text("gpt_os", "replaces: true\n")))
    for part in ("gpt_os.yaml", "replaces is true", "did you mean gpt_oss?"):
        assert part in message


def test_two_files_for_one_family(own):
    """The same family twice in one directory names both files."""
    directory = own(one=family_text("one"), two=family_text("one"))
    message = error_of(directory)
    for part in ("two files for family 'one'", "one.yaml", "two.yaml"):
        assert part in message


def test_one_family_with_two_suffixes(own):
    """x.yaml and x.yml are two files for x."""
    directory = own(one=family_text("one"))
    (directory / "one.yml").write_text(family_text("one"))
    assert "two files for family 'one'" in error_of(directory)


def test_family_must_be_the_file_name(own):
    """A family is found by its file's name."""
    message = error_of(own(one=family_text("other")))
    for part in ("one.yaml", "family is 'other'", "expected 'one'"):
        assert part in message


def test_missing_directory(tmp_path):
    """A families_dir that does not exist is named."""
    assert "families_dir is" in error_of(tmp_path / "none")


def test_a_wrong_item_of_a_list_is_one_sentence(own):
    """The list is not called empty because the item was left out."""
    text = family_text("mine").replace("source: a test", "source: a, end: [x]", 1)
    message = error_of(own(mine=text))
    assert message.endswith("documented_ids.end.0 is 'x', expected a valid integer")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (('start: "<t>"\n', ""), ["start is missing"]),
        (('start: "<t>"', 'start: " "'), ["start is ' '", "not blank"]),
        (('start: "<t>"', "start: 3"), ["start is 3", "string"]),
        (('start: "<t>"', 'start: "</t>"'), ["start and end are both '</t>'"]),
        (('end: "</t>"', 'end: "</t>"\nclose: "stop"'), ["close is 'stop'", "holds end"]),
        (("history: strip", "history: drop"), ["history is 'drop'", "keep_in_tool_loop"]),
        (("history: strip", "histroy: strip"), ["unknown key histroy", "did you mean history?"]),
        (("source: a test", "source: a test, ids: [1]"), ["unknown key documented_ids.ids"]),
        (("source: a test", "source: a, end: [x]"), ["documented_ids.end.0 is 'x'", "integer"]),
        (("source: a test", "source: a, end: []"), ["documented_ids.end is []", "1 item"]),
        (("provenance: unverified", "provenance: sure"), ["is 'sure'", "third_party"]),
        (("*none-such*", "*None*"), ["match.names.0 is '*None*'", "lower case"]),
        (
            ("test, provenance: unverified}\n", "test, provenance: verified}\n"),
            ["history_evidence is", "expected a line", "provenance is 'verified'"],
        ),
        (
            ("{source: a test, provenance", "{line: " + "x" * 161 + ", source: a test, provenance"),
            ["history_evidence.line is", "at most 160 characters"],
        ),
        (("history: strip", "history: strip\ntool_call: ['']"), ["tool_call.0 is ''", "not blank"]),
        (("version: 1", "version: 2"), ["version is 2"]),
        (("version: 1\n", ""), ["version is missing"]),
        (("history: strip", "history: strip\nhistory: keep"), ["already set in line 11"]),
        (
            ("prompt_start: think", "prompt_start: think\nreplaces: yes"),
            ["is 'yes', expected true"],
        ),
    ],
)
def test_wrong_family_file(own, change, parts):
    """Each wrong family file gives one error that names file, field and what was expected."""
    text = family_text("mine")
    assert change[0] in text
    message = error_of(own(mine=text.replace(*change)))
    for part in ["mine.yaml", *parts]:
        assert part in message
