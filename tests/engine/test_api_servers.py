"""Two API servers before one engine: each knows the phases of its own requests."""

import re
import sys

import pytest
from run_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

QUESTION = "p=7, q=p+5, r=q*3. r?"
REQUESTS = 12


def samples(page: str, name: str) -> float:
    """Sum of a sample over its other labels."""
    found = re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def test_two_api_servers_add_up(demo_model, tmp_path):
    """Usage holds whichever server answers, and the metrics page is their sum."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", str(demo_model)]
    command += ["--api-server-count", "2"]
    with Server(command, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, tmp_path) as server:
        replies = [server.chat(QUESTION, max_tokens=300) for _ in range(REQUESTS)]
        page = server.get("/metrics")
    usages = [reply["usage"] for reply in replies]
    thoughts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages]
    assert min(thoughts) > 0
    assert len(set(thoughts)) == 1
    assert all(reply["choices"][0]["meridian"]["ttfat_ms"] > 0 for reply in replies)
    ttfat = "meridian_time_to_first_answer_token_seconds_count"
    assert samples(page, ttfat) == REQUESTS
    tokens = sum(usage["completion_tokens"] for usage in usages)
    assert samples(page, "meridian_output_tokens_total") == tokens
    gaps = samples(page, "meridian_inter_token_seconds_count")
    assert gaps == tokens - REQUESTS
