"""What the demo refuses before it starts a server."""

import socket

import pytest

from meridian_patch.bench.served import plan
from meridian_patch.bench.served.arms import arm_environment, read_arms
from meridian_patch.config.load import load_config
from meridian_patch.demo.run import main, parse
from meridian_patch.emulation import device as devices


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    """Which one there is vLLM says, and it is not needed here."""
    monkeypatch.setattr(plan, "accelerator_name", lambda: None)


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds is '0', expected a whole number above 0"),
        (["--requests", "-3"], "--requests is '-3', expected a whole number above 0"),
        (["--rate", "fast"], "--rate is 'fast', expected a number above 0"),
        (["--arms", "stock,turbo"], "unknown arm 'turbo'; known: stock, noop, patched"),
        (["--arms", "stock,stock"], "arm 'stock' is named twice"),
        (["--blocks", "64"], "--blocks is 64, expected at least 65"),
    ],
)
def test_wrong_option_is_refused(capsys, arguments, message):
    """A wrong value is refused with the option's name and what was expected."""
    code, err = run(capsys, *arguments)
    assert code == 1
    assert err.startswith("demo: ")
    assert message in err


def test_missing_model_is_named(capsys, tmp_path):
    """A model directory that is none is one sentence with its path and what to give."""
    code, err = run(capsys, "--model", str(tmp_path / "nowhere"))
    assert code == 1
    assert err.startswith("demo: model directory ")
    assert "nowhere does not exist; expected a local directory" in err


def test_taken_port_is_refused(capsys, tmp_path):
    """A port in use is refused before any server starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, err = run(capsys, "--port", port, "--out", str(tmp_path / "out"))
    assert code == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in err
    assert not (tmp_path / "out").exists()


def test_request_too_long_for_the_servers_is_refused(capsys, tmp_path):
    """A trace with a limit above the servers' context is refused, naming the request."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"id": "a", "arrival_s": 0, "messages": [{"role": "user", "content": "q?"}], '
        '"expected": "1", "max_tokens": 8192}\n'
    )
    code, err = run(capsys, "--trace", str(trace))
    assert code == 1
    assert "request a: max_tokens is 8192, expected less than 2048" in err


def test_the_demo_shows_the_product_beside_stock_twice():
    """By default also early exit as calibrated; with --noop our scheduler deciding as stock."""
    parsed = parse([])
    arms = [arm.name for arm in read_arms(parsed.arms, parsed.arm, {})]
    assert arms == ["stock", "stock-again", "patched", "exit"]
    early = read_arms("", parsed.arm, {})[0]
    assert load_config(arm_environment(early.environment, {})).config.exit.mode == "enforce"
    assert parse(["--noop"]).arms == "stock,stock-again,patched,noop"


def test_another_model_or_other_arms_leave_the_calibrated_exit_out(tmp_path):
    """The thresholds are those of the tiny reasoner."""
    assert parse(["--model", str(tmp_path)]).arm == []
    assert parse(["--arms", "stock,patched"]).arm == []


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU's device file, which is not there yet."""
    path = tmp_path / "nvidiactl"
    monkeypatch.setattr(devices, "_GPU_FILES", (path,))
    return path


def test_the_demo_plays_on_an_emulated_gpu(gpu, tmp_path):
    """In the short pool of its workload; not for another model, and not where it is told."""
    assert (parse([]).emulate, parse([]).blocks) == ("h100-32b-dense", "72")
    assert parse(["--blocks", "96"]).blocks == "96"
    assert parse(["--emulate", "h100-8b-dense"]).emulate == "h100-8b-dense"
    assert (parse(["--bare"]).emulate, parse(["--bare"]).blocks) == (None, None)
    assert parse(["--model", str(tmp_path)]).emulate is None
    gpu.touch()
    assert (parse([]).emulate, parse([]).emulate_beside_gpu) == ("h100-32b-dense", True)


def test_a_build_that_cannot_emulate_is_refused(capsys, monkeypatch, gpu):
    """Before a server starts, with the ways on."""
    gpu.touch()
    monkeypatch.setattr(plan, "accelerator_name", lambda: "NVIDIA H200")
    code, err = run(capsys)
    assert code == 1
    assert "this vLLM runs on NVIDIA H200, and only its CPU build can emulate" in err
    assert "scripts/setup --cpu" in err


def test_the_demo_pauses_in_tokens_unless_told_otherwise(tmp_path):
    """In seconds where they are given, and a trace file has its own."""
    assert (parse([]).pause, parse([]).pause_tokens) == (None, "180")
    assert (parse(["--pause", "2"]).pause, parse(["--pause", "2"]).pause_tokens) == ("2", None)
    assert parse(["--pause-tokens", "9"]).pause_tokens == "9"
    assert parse(["--trace", str(tmp_path)]).pause_tokens is None
