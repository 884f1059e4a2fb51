"""The page of metrics of servers with several processes: whole, plausible, and never falling."""

import sys
import time

import pytest
from clients import clients
from metrics_page import check_documented, check_monotone, check_sums
from run_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        (["--api-server-count", "2"], ["0"]),
        (["--data-parallel-size", "2"], ["0", "1"]),
        (["--data-parallel-size", "2", "--api-server-count", "2"], ["0", "1"]),
    ],
    ids=["two-api-servers", "dp-2", "both"],
)
def test_every_documented_metric_is_there_and_plausible(demo_model, tmp_path, options, engines):
    """As on one server, for each engine."""
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "serve", str(demo_model), *options]
    with Server(command, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, tmp_path) as server:
        idle = server.get("/metrics")
        with clients(server, 8):
            time.sleep(4)
            before = server.get("/metrics")
            check_documented(before, engines)
            time.sleep(4)
        time.sleep(1)
        after = server.get("/metrics")
    check_documented(after, engines)
    check_monotone(before, after)
    check_sums(idle, after)
