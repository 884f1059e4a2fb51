"""Phases in vLLM's own load report."""

import argparse
import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.requests import Request
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.api_router import (
    ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL,
)
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.entrypoints.serve.utils.orca_metrics import create_orca_header

from meridian_patch.telemetry import counters
from meridian_patch.telemetry.load_report import with_phases
from meridian_patch.telemetry.prometheus import PhaseMetrics

PHASES = {"prefill": 1.0, "think": 5.0, "answer": 2.0}
NAMED = {f"meridian_requests_{phase}": number for phase, number in PHASES.items()}
VLLMS = [("kv_cache_usage_perc", 0.25), ("num_requests_waiting", 3.0)]


@pytest.fixture
def metrics():
    exported = PhaseMetrics("m")
    # Two engines behind one API server.
    for engine in (0, 1):
        exported.initialize(engine)
    exported.record({f"{counters.REQUESTS}:{name}": value for name, value in PHASES.items()}, 0)
    exported.record({f"{counters.REQUESTS}:think": 4}, 1)
    yield
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("meridian_"):
            REGISTRY.unregister(collector)


def report(form: str) -> str | None:
    """What vLLM's server sends, with the middleware that its option names."""
    app = FastAPI()

    @app.get("/")
    def reply(request: Request) -> JSONResponse:
        asked = request.headers.get(ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
        return JSONResponse({}, headers=create_orca_header(asked, VLLMS) if asked else None)

    options = argparse.Namespace(
        middleware=["meridian_patch.telemetry.load_report.LoadReport"],
        allowed_origins=["*"],
        allow_credentials=False,
        allowed_methods=["*"],
        allowed_headers=["*"],
        api_key=None,
        enable_request_id_headers=False,
    )
    init_entrypoints_middleware(options, app, ())

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asked = {ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL: form} if form else {}
            return await client.get("/", headers=asked)

    return asyncio.run(run()).headers.get("endpoint-load-metrics")


def test_text(metrics):
    form, _, rest = report("TEXT").partition(" ")
    values = dict(part.split("=") for part in rest.split(", "))
    expected = {**dict(VLLMS), **NAMED, "meridian_requests_think": 9.0}
    assert form == "TEXT"
    assert values == {f"named_metrics.{name}": str(value) for name, value in expected.items()}


def test_json(metrics):
    form, _, rest = report("JSON").partition(" ")
    assert form == "JSON"
    assert json.loads(rest)["named_metrics"] == {
        **dict(VLLMS),
        **NAMED,
        "meridian_requests_think": 9.0,
    }


def test_none_without_a_question(metrics):
    assert report("") is None


def test_a_server_without_our_metrics_reports_as_stock():
    assert report("TEXT") == create_orca_header("TEXT", VLLMS)["endpoint-load-metrics"]
    assert json.loads(report("JSON")[5:]) == {"named_metrics": dict(VLLMS)}


@pytest.mark.parametrize("form", ["BIN abc", "JSON", "JSON [1]", 'JSON {"other": 1}', ""])
def test_another_form_is_left_as_it_is(form):
    assert with_phases(form, NAMED) == form


def test_a_report_without_metrics():
    assert with_phases("TEXT ", {"a": 1.0}) == "TEXT named_metrics.a=1.0"
