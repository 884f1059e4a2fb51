"""Phases in the load report of a real server."""

import json
import urllib.request

import pytest

pytestmark = pytest.mark.engine


def test_a_response_says_the_phases(served):
    request = urllib.request.Request(
        f"{served.url}/v1/completions",
        json.dumps({"prompt": "1", "max_tokens": 1}).encode(),
        {"Content-Type": "application/json", "endpoint-load-metrics-format": "TEXT"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        report = reply.headers["endpoint-load-metrics"]
    names = {part.split("=")[0] for part in report.removeprefix("TEXT ").split(", ")}
    assert names >= {
        "named_metrics.num_requests_waiting",
        "named_metrics.meridian_requests_prefill",
        "named_metrics.meridian_requests_think",
        "named_metrics.meridian_requests_answer",
    }
