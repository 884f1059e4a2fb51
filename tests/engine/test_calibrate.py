"""`meridian calibrate` on a real engine: from labelled problems to a profile that loads."""

import json
import subprocess
import sys

import pytest
from run_engine import clean_environment

from meridian_patch.config.load import load_config
from meridian_patch.demo.problems import make_problems

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROBLEMS = make_problems(60, seed=5, steps=6)
GRADER = "meridian_patch.demo.problems:grade"
# The tiny reasoner's thoughts have some 200 tokens, one per character, in lines of some 15.
EXIT = {
    "MIN_THINK_TOKENS": "32",
    "PROBE_MIN_GAP_TOKENS": "1",
    "PROBE_MAX_GAP_TOKENS": "16",
    "PROBE_EVERY_STEPS": "1",
    "EAT_WARMUP_PROBES": "5",
    "RPDI_WINDOW_TOKENS": "32",
}
# Nats.
CLOSE = {"abs": 1e-3}


def write_problems(path, answers):
    lines = (
        json.dumps({"prompt": problem.question, "answer": answer})
        for problem, answer in zip(PROBLEMS, answers, strict=True)
    )
    path.write_text("\n".join(lines))
    return path


def calibrate(model, data, folder, out):
    options = {"--model": model, "--data": data, "--grader": GRADER, "--epsilon": "0.25"}
    engine = ("max_model_len=1024", "dtype=float32", "enforce_eager=true")
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "calibrate", "--out", str(out)]
    command += [text for pair in options.items() for text in map(str, pair)]
    command += [text for value in engine for text in ("--engine", value)]
    env = clean_environment(folder)
    env |= {f"MERIDIAN_PATCH_SET_EXIT__{name}": value for name, value in EXIT.items()}
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def done(demo_model, tmp_path_factory):
    """The command's run on problems with right answers, and its folder."""
    folder = tmp_path_factory.mktemp("calibrate")
    data = write_problems(folder / "problems.jsonl", [problem.answer for problem in PROBLEMS])
    run = calibrate(demo_model, data, folder, folder / "out")
    log = folder / "out" / "engine.log"
    assert run.returncode == 0, run.stdout + run.stderr + (log.read_text() if log.is_file() else "")
    return run, folder


def test_says_what_it_chose(done):
    """Each pass came to its end, and each strategy has a sentence."""
    run, _ = done
    assert "60/60" in run.stdout
    for words in ("eat: ", "rpdi: ", "profile.yaml", "report.html"):
        assert words in run.stdout


def test_the_profile_is_a_configuration(done):
    """It holds the schedule that was calibrated with, a threshold, and where it comes from."""
    _, folder = done
    config = load_config({"MERIDIAN_PATCH_CONFIG": str(folder / "out" / "profile.yaml")}).config
    assert (config.exit.mode, config.exit.min_think_tokens) == ("observe", 32)
    assert config.exit.eat or config.exit.rpdi
    assert config.provenance["model"]["name"] == "tiny-reasoner"
    assert (config.provenance["problems"], config.provenance["data"]) == (60, "problems.jsonl")


def test_bolder_thresholds_think_less(done):
    """Think tokens never rise along the curve, and natural accuracy is the model's."""
    _, folder = done
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["natural"]["accuracy"] >= 0.85
    place = result["curve_columns"].index("mean_think_tokens")
    for strategy in result["strategies"].values():
        tokens = [row[place] for row in strategy["curve"]]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[0] <= result["natural"]["mean_think_tokens"]
        assert tokens[-1] < 0.6 * tokens[0]
    assert "data:image/png;base64," in (folder / "out" / "report.html").read_text()


@pytest.mark.nightly
def test_entropies_are_those_of_the_model(done, demo_model):
    """Of think tokens and of probes, against transformers on the same tokens."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    _, folder = done
    lines = [json.loads(line) for line in (folder / "out" / "replies.jsonl").open()][1:]
    by_key = {line["key"]: line for line in lines}
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    network = Qwen3ForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()

    def entropies(ids):
        with torch.inference_mode():
            logits = network(torch.tensor([ids])).logits[0].double()
        return torch.distributions.Categorical(logits=logits).entropy().tolist()

    for number, problem in enumerate(PROBLEMS, 1):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        prompt = tokenizer.encode(prompt, add_special_tokens=False)
        (thought,) = (line for key, line in by_key.items() if key.startswith(f"measured/{number}/"))
        known = entropies([*prompt, *thought["ids"]])[len(prompt) - 1 : -1]
        assert thought["entropies"] == pytest.approx(known, **CLOSE)
        probes = [(key, line) for key, line in by_key.items() if key.startswith(f"probe/{number}/")]
        assert probes
        for key, line in probes[:5]:
            at = int(key.rpartition("/")[2])
            after = entropies(
                [*prompt, *thought["ids"][:at], tokenizer.convert_tokens_to_ids("</think>")]
            )
            assert line["entropies"] == pytest.approx(after[-1:], **CLOSE)


def test_an_all_wrong_model_is_refused(done, demo_model, tmp_path):
    """With what the engine replied before: answers are no part of it, and it is not asked again."""
    _, folder = done
    wrong = [str((int(problem.answer) + 1) % 10) for problem in PROBLEMS]
    data = write_problems(tmp_path / "wrong.jsonl", wrong)
    log = (folder / "out" / "engine.log").stat().st_mtime_ns
    out = tmp_path / "out"
    out.mkdir()
    (out / "replies.jsonl").write_bytes((folder / "out" / "replies.jsonl").read_bytes())
    (out / "profile.yaml").write_text("of another run")
    run = calibrate(demo_model, data, tmp_path, out)
    assert run.returncode == 1
    assert "natural answers are right, no more than the loss allowed" in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (out / "profile.yaml").exists()
    assert (folder / "out" / "engine.log").stat().st_mtime_ns == log
    assert not (out / "engine.log").exists()
