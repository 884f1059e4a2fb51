"""Serves the tiny reasoner under a changing load, and has Prometheus keep what it says.

scripts/dashboard_pictures/run record FOLDER
"""

import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import yaml
from alerting import ALERTS, ROOT, RULES, program
from clients import in_threads
from core_reports import THINK_END_ID
from run_engine import PATCHED
from run_server import Server

from meridian_patch.demo.problems import make_problems

EXAMPLE = ROOT / "examples" / "observability" / "prometheus.yml"
MODEL = ROOT / "meridian_patch" / "demo" / "tiny-reasoner"
VOCABULARY = 264
# Its thoughts have a few dozen to a few hundred tokens; the defaults are for thousands.
SETTINGS = {
    "MIN_THINK_TOKENS": 48,
    "PROBE_MIN_GAP_TOKENS": 12,
    "PROBE_MAX_GAP_TOKENS": 24,
    "EAT_WARMUP_PROBES": 4,
    "RPDI_WINDOW_TOKENS": 16,
    "RPDI_LAMBDA": 1.6,
    "LOOP": "true",
}
ENFORCE = {"vllm_xargs": {"meridian_exit": "enforce"}}
BOUNDED = {
    "vllm_xargs": {
        "meridian_exit": "enforce",
        "meridian_max_think_tokens": 120,
        "meridian_wrap_up": "I must answer now.",
    }
}
# A thought that does not end before max_tokens: it fills the pool.
ENDLESS = {"ignore_eos": True, "max_tokens": 500, "logit_bias": {str(THINK_END_ID): -100}}
# A close that would be undone, and is given up.
REFUSED = {
    "allowed_token_ids": [token for token in range(VOCABULARY) if token != THINK_END_ID],
    "max_tokens": 150,
    **BOUNDED,
}


def main(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(MODEL), "--served-model-name", "tiny-reasoner"]
    settings = {f"MERIDIAN_PATCH_SET_EXIT__{name}": str(it) for name, it in SETTINGS.items()}
    with (
        Server(command, PATCHED | settings, folder / "server") as server,
        prometheus(folder, f"127.0.0.1:{server.port}"),
    ):
        begin = time.time()
        drive(server)
        end = time.time()
    print(f"scripts/dashboard_pictures: recorded {begin:.0f} to {end:.0f} in {folder}")
    (folder / "range").write_text(f"{begin:.0f} {end:.0f}\n")


def drive(server: Server) -> None:
    """Twelve minutes: calm, too much at once, the same with early exit, calm again."""
    with ExitStack() as always:
        always.enter_context(clients(server, 2))
        always.enter_context(clients(server, 1, ENFORCE))
        always.enter_context(clients(server, 1, {"turns": 4}))
        time.sleep(150)
        with clients(server, 8), clients(server, 3, ENDLESS), clients(server, 2, {"turns": 4}):
            time.sleep(210)
        with clients(server, 5, ENFORCE), clients(server, 5, BOUNDED), clients(server, 1, REFUSED):
            time.sleep(210)
        time.sleep(150)


@contextmanager
def clients(server: Server, number: int, body: dict | None = None):
    """So many ask while the block runs, each the next problem when one is answered.

    Args:
        server: who is asked.
        number: clients.
        body: added to the body of a request; its ``turns`` are the problems of one conversation.
    """
    done = threading.Event()
    body = dict(body or {})
    turns = body.pop("turns", 1)

    def ask(seed: int) -> None:
        problems = iter(make_problems(10_000, seed=seed))
        while not done.is_set():
            messages: list[dict[str, str]] = []
            for problem in islice(problems, turns):
                messages.append({"role": "user", "content": problem.question})
                asked = {"messages": messages, "temperature": 0.8, "max_tokens": 350} | body
                server.post("/v1/chat/completions", {"model": "tiny-reasoner", **asked})
                messages.append({"role": "assistant", "content": problem.answer})
                if done.is_set():
                    break
            done.wait(random.uniform(0.0, 0.5))

    seeds = [random.randrange(2**31) for _ in range(number)]
    with in_threads(ask, seeds, done):
        yield


@contextmanager
def prometheus(folder: Path, target: str):
    """Scrapes the server as the example of the repository does, until the block ends."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["rule_files"] = [str(RULES), str(ALERTS)]
    static = {"targets": [target], "labels": {"instance": "localhost:8000"}}
    config["scrape_configs"][0]["static_configs"] = [static]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
    process = subprocess.Popen([*command, "--log.level=error"])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
