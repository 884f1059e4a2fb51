"""Who makes room for whom on a real server with two seats, before and after lengths are known."""

import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from engine_plans import AMPLE
from run_server import Server

pytestmark = pytest.mark.engine

# So many tokens has each thought that is like the others.
EVEN = 90
SETTINGS = {
    "MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS": "30",
    "MERIDIAN_PATCH_SET_EXIT__MODE": "off",
}


def think(server: Server, tokens: int) -> float:
    """Think for so many tokens, whatever the model would do; returns when that has ended."""
    body = {"max_tokens": tokens, "ignore_eos": True, "logit_bias": {"257": -100}}
    server.chat(AMPLE[0].question, **body)
    return time.monotonic()


def metric(server: Server, pattern: str) -> float:
    """Sum of the series whose name and labels match."""
    found = re.findall(rf"^{pattern} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return sum(map(float, found))


def displaced(server: Server) -> float:
    """Thinkers that were preempted so far; the pool is ample, so others took their seats."""
    return metric(server, r'meridian_preemptions_total\{.*phase="think".*\}')


def newcomer_beside_two(
    server: Server, pool: ThreadPoolExecutor, tokens: int
) -> tuple[float, float]:
    """When a thought of ten tokens ended, and the first of two that had both seats before it."""
    two: list[Future[float]] = [pool.submit(think, server, tokens) for _ in range(2)]
    while metric(server, r"vllm:num_requests_running\{.*\}") < 2:
        time.sleep(0.02)
    # Beyond the first level.
    time.sleep(0.7)
    ended = think(server, 10)
    return ended, min(each.result() for each in two)


@pytest.mark.parametrize("is_on", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_longer_thinkers_make_room_until_lengths_are_known_to_be_alike(demo_model, tmp_path, is_on):
    """First a newcomer takes a seat. After thoughts of one length it waits: the others end soon."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", str(demo_model)]
    command += ["--max-num-seqs", "2", "--max-model-len", "1024"]
    off = {} if is_on else {"MERIDIAN_PATCH_SET_POLICY__TIME_SHARING": "false"}
    with Server(command, SETTINGS | off, tmp_path) as server, ThreadPoolExecutor(8) as pool:
        ended, first = newcomer_beside_two(server, pool, 300)
        assert (ended < first) is is_on
        assert (displaced(server) > 0) is is_on
        list(pool.map(lambda _: think(server, EVEN), range(24)))
        before = displaced(server)
        list(pool.map(lambda _: think(server, EVEN), range(10)))
        assert displaced(server) == before
