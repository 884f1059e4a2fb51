"""Policy and early exit of a server are switched while it answers."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from itertools import cycle, islice

import pytest
from engine_plans import PATIENT, v2_job
from metrics_page import value_of
from run_engine import PATCHED, run_job
from run_server import Server
from workloads import sample

pytestmark = pytest.mark.engine

KEY = "a key of this test"
PATH = "/v1/meridian/policy"
QUESTIONS = [f"p={p}, q=p+5, r=q*3. r?" for p in range(1, 9)]
SPENT = "meridian_policy_seconds_total"


class Switched:
    """A server with the endpoint, and the commands that an operator gives."""

    def __init__(self, server: Server, folder) -> None:
        self.server = server
        self.key_file = folder / "key"
        self.key_file.write_text(KEY)

    def command(self, *arguments: str) -> str:
        line = [sys.executable, "-P", "-m", "meridian_patch.cli", "policy", *arguments]
        line += ["--url", self.server.url, "--api-key-file", str(self.key_file)]
        return subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout

    def answer(self, question: str, **body) -> str:
        message = {"role": "user", "content": question}
        asked = {"messages": [message], "temperature": 0, "max_tokens": 300} | body
        request = urllib.request.Request(
            f"{self.server.url}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            choice = json.loads(reply.read())["choices"][0]
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"]

    def spent_s(self) -> float:
        """Time that the policy has taken, as the server counts it."""
        return value_of(self.server.get("/metrics"), SPENT)

    def rises(self) -> bool:
        """Whether the policy arranges steps, from a second after now on."""
        time.sleep(1.0)
        before = self.spent_s()
        time.sleep(2.0)
        return self.spent_s() > before


@pytest.fixture(scope="module")
def switched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switched")
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve"]
    command += ["--emulate", "h100-8b-dense", "--api-key", KEY, "--max-num-seqs", "4"]
    env = {
        # The command adds the plug-in itself.
        "VLLM_PLUGINS": "meridian_switch",
        "MERIDIAN_PATCH_SET_EXIT__MODE": "enforce",
        # Thoughts of the tiny reasoner are shorter: none is closed.
        "MERIDIAN_PATCH_SET_EXIT__MIN_THINK_TOKENS": "512",
    }
    with Server(command, env, folder) as server:
        yield Switched(server, folder)


def test_a_switch_under_load_loses_no_request_and_changes_no_text(switched):
    """It has effect in the next second, and back; the policy arranges steps only when it is on."""
    alone = [switched.answer(question) for question in QUESTIONS]
    assert "policy latency  early exit enforce\n" in switched.command("show")
    end_s = time.monotonic() + 16

    def client(number: int) -> list[tuple[str, str]]:
        # Each begins at another question.
        asked = islice(cycle(zip(QUESTIONS, alone, strict=True)), number, None)
        found = []
        while time.monotonic() < end_s:
            question, text = next(asked)
            found.append((switched.answer(question), text))
        return found

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, number) for number in range(8)]
        is_on = switched.rises()
        turned_off = switched.command("set", "noop")
        is_off = not switched.rises()
        turned_on = switched.command("set", "latency", "--exit", "observe")
        is_on_again = switched.rises()
        answers = [pair for each in running for pair in each.result()]
    assert is_on
    assert is_off
    assert is_on_again
    assert "policy noop  early exit enforce  (started as latency, enforce)" in turned_off
    assert "policy latency  early exit observe  (started" in turned_on
    assert len(answers) > 40
    assert [got for got, _ in answers] == [expected for _, expected in answers]
    page = switched.server.get("/metrics")
    for name in ("policy noop", "policy latency", "exit observe"):
        assert value_of(page, "meridian_switches_total", to=name) == 1
    (core,) = [each for each in switched.server.status() if each["role"] == "engine_core"]
    assert core["exit"] == "observe"
    assert "policy switched from latency to noop while" in switched.server.log.read_text()


def test_early_exit_is_switched(switched):
    """The mode of each later request is the one in force."""
    question = QUESTIONS[0]
    body = {"max_tokens": 300, "vllm_xargs": {"meridian_max_think_tokens": 8}}
    whole = switched.answer(question)
    switched.command("set", "--exit", "enforce")
    closed = switched.answer(question, **body)
    switched.command("set", "--exit", "off")
    assert switched.answer(question, **body) == whole
    assert closed != whole


def test_who_may_switch(switched):
    """The server's own key guards it, and what is asked for must be there."""
    assert switched.server.post(PATH, {"policy": "noop"})[0] == HTTPStatus.UNAUTHORIZED
    with pytest.raises(urllib.error.HTTPError) as refused:
        switched.server.get(PATH)
    assert refused.value.code == HTTPStatus.UNAUTHORIZED


@pytest.mark.nightly
def test_model_runner_v2_goes_on_as_before(demo_model, tmp_path):
    """Under pressure: off after 60 steps and on after 200, every token is as without a switch."""
    job = v2_job(demo_model, PATCHED | PATIENT)
    (stage,) = job.stages
    (pressure,) = [run for run in stage["runs"] if run["name"] == "pressure"]
    switches = [
        {"do": "switch", "policy": policy, "exit": None, "at_step": step}
        for policy, step in (("noop", 60), ("latency", 200))
    ]
    runs = [pressure, pressure | {"name": "switched", "events": switches}]
    found = run_job(replace(job, stages=[stage | {"runs": runs}]), tmp_path)["stages"]["async"]
    plain, switched = (found["runs"][run["name"]] for run in runs)
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert [event["result"]["policy"] for event in switched["events"]] == ["noop", "latency"]
    assert switched["counted"]["switched:policy noop"] == 1
    assert plain["outputs"].keys() == switched["outputs"].keys()
    for name in plain["outputs"]:
        assert sample(switched, name)["ids"] == sample(plain, name)["ids"]
    assert switched["preemptions"]
