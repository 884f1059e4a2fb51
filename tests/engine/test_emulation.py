"""An emulated device under real engines: the time of its steps is the cost model's, and the tokens
are those of an engine without it."""

import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from itertools import pairwise

import pytest
from engine_plans import AMPLE, PRESSURE_RUN, STRUCTURED_RUN
from run_engine import STOCK, Job, run_job
from run_server import Server
from workloads import ask_all, engine_arguments, token_ids

from meridian_patch.emulation.device import load_device
from meridian_patch.emulation.ledger import WARM_UP_STEPS
from meridian_patch.emulation.options import WORKER
from meridian_patch.replay.types import StepWork

pytestmark = pytest.mark.engine

DEVICE = "h100-32b-dense"
# One token for so many: a busy machine keeps up with steps that are as many times longer.
TOKENS = 4
# Its steps are shorter than those of any machine here: all are late, and none waits.
FAST = """\
version: 1
name: fast
provenance: derived
derivation: made up for a test
fixed_s: {fixed_s}
weights_s: 0.0
kv_read_s_per_token: 0.0
token_s: 1.0e-9
attention_s_per_pair: 0.0
"""


def a_device(folder, fixed_s: float) -> dict[str, str]:
    """Environment of an engine on a device whose steps take so long; its report is beside it."""
    (folder / "device.yaml").write_text(FAST.format(fixed_s=fixed_s))
    return {
        "MERIDIAN_PATCH_EMULATE": str(folder / "device.yaml"),
        "MERIDIAN_PATCH_EMULATE_REPORT": str(folder / "report.json"),
    }


def report_of(folder) -> dict:
    return json.loads((folder / "report.json").read_text())


def token_times(server: Server, question: str, max_tokens: int) -> list[float]:
    """When each token of a streamed chat reached its client."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
    return streamed(server, "chat/completions", body | {"temperature": 0})


def streamed(server: Server, path: str, body: dict) -> list[float]:
    """When each token of a streamed request reached its client."""
    request = urllib.request.Request(
        f"{server.url}/v1/{path}",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        return [time.perf_counter() for line in stream if b'"delta"' in line or b'"text"' in line]


def completion(server: Server, prompt: str) -> str:
    """What a server's model goes on to say."""
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0}
    status, text = server.post("/v1/completions", body)
    assert status == HTTPStatus.OK, text
    return json.loads(text)["choices"][0]["text"]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["patched", "stock"])
def test_a_served_token_takes_the_devices_step(mode, served, tmp_path):
    """Alone, a request gets a token per decode step; scheduling is hidden behind the step before.

    Its tokens are those of a server that emulates nothing.
    """
    report = tmp_path / "report.json"
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", "--emulate", DEVICE]
    command += ["--emulate-tokens", str(TOKENS)]
    env = {"MERIDIAN_PATCH": "1" if mode == "patched" else "0"}
    # An inherited list of plug-ins must not decide.
    with Server([*command, "--emulate-report", str(report)], env, tmp_path) as server:
        question = AMPLE[0].question
        token_times(server, question, WARM_UP_STEPS // 2)
        token_times(server, question, WARM_UP_STEPS // 2)
        times = token_times(server, question, 120)
        text = completion(server, question)
        assert ("meridian_" in server.get("/metrics")) == (mode == "patched")
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    assert len(gaps) > 60
    work = StepWork(decode_seqs=1, context_tokens=120, attended_tokens=120)
    device = load_device(DEVICE, str(TOKENS))
    assert statistics.median(gaps) == pytest.approx(device.step_seconds(work), rel=0.03)
    data = json.loads(report.read_text())
    assert data["is_async"]
    assert data["runner"] == "V1"
    # Each step but a request's first few was submitted while the one before it ran.
    assert data["overlapped_steps"] > 0.8 * (data["decode"]["steps"] + data["prefill"]["steps"])
    assert "no GPU runs here" in server.log.read_text()
    assert "emulated h100-32b-dense (derived, 1 token for 4): " in server.log.read_text()
    assert len(text) > 20
    assert text == completion(served, question)


@pytest.mark.nightly
def test_outputs_are_those_of_an_engine_without_a_device(v1_stock, demo_model, tmp_path):
    """V1, asynchronous, in a small pool: with preemptions and grammars, and steps that are late."""
    small = {"num_gpu_blocks_override": 37, "max_model_len": 1024, "max_num_batched_tokens": 64}
    small |= {"reasoning_parser": "deepseek_r1", "async_scheduling": True}
    engine = engine_arguments(demo_model, **small, worker_cls=WORKER)
    runs = [STRUCTURED_RUN, PRESSURE_RUN]
    job = Job(
        [{"name": "async", "engine": engine, "runs": runs}],
        env=STOCK | a_device(tmp_path, 1e-4),
        allow_async=True,
    )
    stage = run_job(job, tmp_path)["stages"]["async"]
    theirs = {**v1_stock["stages"]["priority"]["runs"], **v1_stock["stages"]["async"]["runs"]}
    for run in runs:
        assert token_ids(stage["runs"][run["name"]]) == token_ids(theirs[run["name"]])
    assert stage["runs"]["pressure"]["preemptions"]
    data = report_of(tmp_path)
    assert data["is_async"]
    assert data["prefill"]["steps"] > 10
    assert not data["is_certified"]
    assert data["sentence"].startswith("not certified: this machine is too slow")


@pytest.mark.nightly
def test_runner_v2_runs_on_the_devices_time(v2_stock, demo_model, tmp_path):
    """In Triton's interpreter, on a device that is slower still; the tokens are the same."""
    engine = engine_arguments(
        demo_model,
        num_gpu_blocks_override=18,
        max_model_len=512,
        max_num_batched_tokens=64,
        async_scheduling=True,
        worker_cls=WORKER,
    )
    run = {"name": "ample", "requests": ask_all("a", AMPLE[:2], max_tokens=60)}
    longer = {"name": "longer", "requests": ask_all("b", AMPLE[:1], max_tokens=120)}
    job = Job(
        [{"name": "async", "engine": engine, "runs": [run, longer]}],
        env=STOCK | a_device(tmp_path, 0.1),
        allow_async=True,
        model_runner_v2=True,
    )
    stage = run_job(job, tmp_path)["stages"]["async"]
    theirs = v2_stock["stages"]["async"]["runs"]["ample"]
    assert token_ids(stage["runs"]["ample"]) == token_ids(theirs)
    data = report_of(tmp_path)
    assert data["is_async"]
    assert data["runner"] == "V2"
    decode = data["decode"]
    assert decode["steps"] > 30
    assert decode["device_s"] == pytest.approx(0.1 * decode["steps"], rel=0.01)
    assert data["overlapped_steps"] > 0.8 * decode["steps"]


def a_server(device: str, mode: str, folder) -> Server:
    """A patched or a stock server on a device of these sizes."""
    (folder / "device.yaml").write_text(device)
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", "--emulate"]
    command += [str(folder / "device.yaml")]
    return Server(command, {"MERIDIAN_PATCH": "1" if mode == "patched" else "0"}, folder)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["patched", "stock"])
def test_prompts_beside_an_answer_stay_within_the_graph(mode, tmp_path):
    """A step above the captured size takes 0.5 s here, whatever is in it: prompts are cut below it.

    A stock server computes each prompt at once, and the answer beside them stands still.
    """
    device = FAST.format(fixed_s=0.04) + "graph_tokens: 40\nlaunch_s: 0.5\nkv_tokens: 20000\n"
    filler = {"prompt": "0123456789" * 16, "max_tokens": 1, "temperature": 0}
    with a_server(device, mode, tmp_path) as server:
        token_times(server, AMPLE[0].question, 20)
        with ThreadPoolExecutor(2) as pool:
            # Where no request reasons, the patched server does as stock does.
            thought = pool.submit(token_times, server, AMPLE[0].question, 200)
            time.sleep(0.5)
            body = {"prompt": "Say:", "max_tokens": 80, "ignore_eos": True}
            answer = pool.submit(streamed, server, "completions", body)
            while not answer.done():
                time.sleep(0.3)
                server.post("/v1/completions", filler)
            times = answer.result()
            assert len(thought.result()) > 20
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(gaps) > 30
    if mode == "patched":
        assert max(gaps) < 0.4
    else:
        assert max(gaps) > 0.45


@pytest.mark.nightly
def test_prompts_beside_an_answer_are_not_computed_in_dear_pieces(tmp_path):
    """As on an H200: with any prompt token a step takes long, above the graph hardly longer.

    A prompt of 800 tokens in pieces of 98 within the graph took 1.6 s. In large pieces it takes 0.3
    to 0.6 s, and longer where other work has the cores.
    """
    device = FAST.format(fixed_s=0.02) + "graph_tokens: 100\npieces_s: 0.12\nlaunch_s: 0.16\n"
    times_s = []
    with a_server(device + "kv_tokens: 20000\n", "patched", tmp_path) as server:
        token_times(server, AMPLE[0].question, 20)
        with ThreadPoolExecutor(2) as pool:
            thought = pool.submit(token_times, server, AMPLE[0].question, 600)
            time.sleep(0.5)
            body = {"prompt": "Say:", "max_tokens": 250, "ignore_eos": True}
            answer = pool.submit(streamed, server, "completions", body)
            while not answer.done():
                time.sleep(0.2)
                begin = time.monotonic()
                # Another prompt each time: none is in the prefix cache.
                prompt = f"{len(times_s)} " + "0123456789" * 80
                server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
                times_s.append(time.monotonic() - begin)
            thought.result()
    print("times of prompts:", [round(each, 2) for each in times_s])
    late = times_s[len(times_s) // 2 :]
    assert len(late) > 5
    assert statistics.median(late) < 1.0
