"""What `meridian calibrate` refuses before an engine is started, in one sentence each."""

import json
import math

import pytest

from meridian_patch import cli
from meridian_patch.calibrate.engine_process import EngineProcess, EngineRequest
from meridian_patch.calibrate.graders import make_grader
from meridian_patch.calibrate.problems import Problem, read_problems
from meridian_patch.calibrate.profile import model_identity
from meridian_patch.calibrate.thresholds import EAT, KINDS, RPDI, read_thresholds
from meridian_patch.config.schema import ExitConfig
from meridian_patch.errors import CalibrationError

GOOD = {"prompt": "2+2?", "answer": "4"}


def write(folder, *lines):
    path = folder / "problems.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


def calibrate(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate", *map(str, arguments)])
    return ended.value.code, capsys.readouterr().err


@pytest.fixture
def many(tmp_path):
    return write(tmp_path, *({**GOOD, "id": n} for n in range(100)))


def test_problems_are_read(tmp_path):
    """Prompt or messages, a name or the line's number; blank lines and more fields do not count."""
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    path = write(tmp_path, {**GOOD, "level": 3}, "", {"id": "b", "messages": messages, "answer": 4})
    found = read_problems(path)
    assert found.problems == [
        Problem("1", ({"role": "user", "content": "2+2?"},), "4", 1),
        Problem("b", tuple(messages), 4, 3),
    ]
    assert len(found.sha256) == 64


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0c", "\x1c"])
def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path, character):
    """Other characters that end lines of a text may stand in a JSON string as they are."""
    prompt = f"2{character}+2?"
    if character < " ":
        path = write(tmp_path, GOOD, json.dumps({**GOOD, "id": 2}) + f"{character}", GOOD)
        with pytest.raises(CalibrationError, match="line 2: not JSON"):
            read_problems(path)
        return
    path = write(tmp_path, json.dumps({**GOOD, "prompt": prompt}, ensure_ascii=False), GOOD)
    (first, second) = read_problems(path).problems
    assert first.messages[0]["content"] == prompt
    assert second.line == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{nope"], "line 2: not JSON: .* at column 2"),
        (["[" * 100_000], "line 1: not JSON: lists and objects are nested too deeply"),
        (['{"prompt": "a", "answer": ' + "9" * 5000 + "}"], "not JSON: a number has 5000 digits"),
        (['{"prompt": "a", "answer": NaN}'], "not JSON: it has no NaN"),
        (['{"prompt": "a", "answer": 1e999}'], "not JSON: 1e999 is larger than any float"),
        (['{"prompt": "a", "prompt": "b", "answer": 1}'], "not JSON: key 'prompt' stands twice"),
        (['{"prompt": "\\ud800", "answer": 1}'], "not JSON: a text holds one half of a surr"),
        (["[1]"], "line 1: list, expected an object"),
        ([GOOD, {"prompt": "a"}], "line 2: answer is missing"),
        ([{"prompt": "a", "answer": " "}], "line 1: answer is missing"),
        ([{"answer": "a"}], "line 1: expected either prompt or messages"),
        ([{**GOOD, "messages": []}], "line 1: expected either prompt or messages"),
        ([{"prompt": 3, "answer": "a"}], "line 1: prompt is 3, expected text"),
        ([{"messages": [], "answer": "a"}], r"line 1: messages is \[\], expected a list"),
        ([{"messages": [{"role": "user"}], "answer": "a"}], r"line 1: messages\[0\] is"),
        ([{**GOOD, "id": True}], "line 1: id is True"),
        ([{**GOOD, "id": "x"}, {**GOOD, "id": "x"}], "line 2: id 'x' is that of line 1 too"),
        ([""], "holds no problems"),
    ],
)
def test_wrong_data(tmp_path, lines, message):
    """File, line and field are named."""
    with pytest.raises(CalibrationError, match=rf"^data file .*problems.jsonl.*{message}"):
        read_problems(write(tmp_path, *lines))


def test_a_missing_file(tmp_path):
    """The path is named."""
    with pytest.raises(CalibrationError, match=r"no\.jsonl cannot be read: No such file"):
        read_problems(tmp_path / "no.jsonl")


@pytest.mark.parametrize(
    ("spec", "text", "right", "expected"),
    [
        ("exact", " 4\n", "4", True),
        ("exact", "4", 4, True),
        ("exact", "It is 4", "4", False),
        ("numeric", "So 3 + 1 = 4.", "4", True),
        ("numeric", "1,234.50 in all", 1234.5, True),
        ("numeric", r"\boxed{-4} of 9", "-4", True),
        ("numeric", "no number", "4", False),
        ("numeric", "1e3", "1000", True),
        (r"regex:Answer: (\w+)", "Answer: A, no, Answer: B.", "B", True),
        (r"regex:\d+", "first 3, then 4", 4, True),
        (r"regex:(a)|b", "b", "a", False),
        ("regex:x", "nothing", "x", False),
        ("meridian_patch.demo.problems:grade", "4\nFrom", "4", True),
        ("operator:eq", "4", "5", False),
    ],
)
def test_graders(spec, text, right, expected):
    """Each kind, right and wrong."""
    grader = make_grader(spec)
    problem = Problem("a", (), right, 1)
    grader.check("x", [problem])
    assert grader.is_right(text, problem) is expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fuzzy", "grader 'fuzzy' is unknown; known: exact, numeric, regex:PATTERN"),
        ("regex:", "grader 'regex:' is unknown"),
        ("regex:(", "not a regular expression"),
        ("no_such_module:f", "module no_such_module cannot be imported"),
        ("json:no_such", "module json has no function no_such"),
    ],
)
def test_wrong_graders(spec, message):
    """The name and what is known are said."""
    with pytest.raises(CalibrationError, match=message):
        make_grader(spec)


def test_a_grader_of_the_working_directory(tmp_path, monkeypatch):
    """It is found there; when it fails, grader and problem are named."""
    (tmp_path / "my_grader_module.py").write_text(
        "def judge(text, right):\n    return text[0] == right\n"
    )
    monkeypatch.chdir(tmp_path)
    grader = make_grader("my_grader_module:judge")
    assert grader.is_right("4 it is", Problem("a", (), "4", 1))
    with pytest.raises(CalibrationError, match=r"failed on problem a \(line 7\): IndexError"):
        grader.is_right("", Problem("a", (), "4", 7))


@pytest.mark.parametrize(("spec", "answer"), [("numeric", "four"), ("exact", ["4"])])
def test_answers_that_a_grader_cannot_use(tmp_path, spec, answer):
    """Known before an engine is started."""
    found = read_problems(write(tmp_path, {"prompt": "a", "answer": answer}))
    with pytest.raises(CalibrationError, match=f"line 1: answer is .* for grader {spec}"):
        make_grader(spec).check(found.path, found.problems)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epsilon", "1"], "--epsilon is '1', expected a number between 0 and 1"),
        (["--confidence", "nan"], "--confidence is 'nan'"),
        (["--eat-deltas", "1e-3,0"], "--eat-deltas: '0', expected numbers above 0"),
        (["--rpdi-lambdas", "1.0"], "--rpdi-lambdas: '1.0', expected numbers above 1"),
        (["--strategies", "eat,dear"], "unknown strategy 'dear'; known: eat, rpdi"),
        (["--grader", "fuzzy"], "grader 'fuzzy' is unknown"),
        (["--grader", "numeric", "--temperature", "9"], "--temperature is '9'"),
        (["--max-tokens", "0"], "--max-tokens is '0', expected a whole number above 0"),
        (["--engine", "seed"], "--engine is 'seed', expected NAME=VALUE"),
        (["--model", "/no/such/model"], "model directory /no/such/model does not exist"),
    ],
)
def test_wrong_options(many, options, message, capsys):
    """One line, status 1, no traceback."""
    code, printed = calibrate(["--model", "m", "--data", many, *options], capsys)
    assert code == 1
    assert message in printed
    assert printed.startswith("meridian: ")
    assert printed.count("\n") == 1


def test_too_few_problems_for_the_bound(many, demo_model, capsys):
    """Said before an engine is started."""
    code, printed = calibrate(["--model", demo_model, "--data", many], capsys)
    assert code == 1
    assert "100 problems are too few" in printed
    assert "at least 736 while eat and rpdi share it, or 299 for one alone" in printed


def test_a_model_without_boundaries(many, demo_model, tmp_path, capsys):
    """A family is needed to know where a thought ends."""
    model = tmp_path / "plain"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((demo_model / name).read_text())
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    code, printed = calibrate(["--model", model, "--data", many], capsys)
    assert code == 1
    assert "no family file fits" in printed
    assert "no thought to end early" in printed


def test_strategies_that_are_off(many, monkeypatch, capsys):
    """Then there is nothing to calibrate, unless one is named."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__EAT", "false")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__RPDI", "false")
    code, printed = calibrate(["--model", "m", "--data", many], capsys)
    assert code == 1
    assert "exit.eat and exit.rpdi are off in the configuration" in printed


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_fixed_thresholds_are_in_range(kind):
    """Each is one that the configuration takes."""
    for threshold in kind.thresholds:
        assert getattr(ExitConfig(**{kind.key: threshold}), kind.key) == threshold
    assert read_thresholds(kind, None) is kind.thresholds
    assert read_thresholds(RPDI, "1.5,2") == [1.5, 2.0]
    assert EAT.thresholds[0] < 1e-6
    assert all(math.isfinite(threshold) for threshold in kind.thresholds)


def test_an_engine_that_does_not_start(tmp_path, monkeypatch):
    """The end of its log is in the message."""
    monkeypatch.setattr("meridian_patch.calibrate.engine_process._ENGINE", "no_such_module:E")
    with EngineProcess({}, {}, tmp_path / "engine.log") as engine:
        assert list(engine.run([])) == []
        with pytest.raises(
            CalibrationError, match=r"(?s)engine.log; the last lines:.*no_such_module"
        ):
            list(engine.run([EngineRequest("a", [1], 1, is_measured=False)]))


def test_a_model_is_told_by_its_weights(demo_model, tmp_path):
    """A snapshot of the Hugging Face cache by its commit too."""
    identity = model_identity(demo_model)
    assert identity["name"] == "tiny-reasoner"
    assert len(identity["weights_sha256"]) == 64
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert model_identity(snapshot) == {
        "name": "models--org--name",
        "revision": "abc",
        "weights_bytes": 0,
    }
