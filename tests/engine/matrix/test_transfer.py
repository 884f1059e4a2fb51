"""KV cache that others hear of, load and store."""

import re

import pytest
from copied_tier import LOADED
from matrix_checks import assert_cores_work, assert_works, measured, probed
from matrix_plans import cell as stage
from matrix_plans import crowd, streaming_crowd

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

NO_PROBES = "EAT is off, thoughts are not probed: the KV connector ExampleConnector would see"
OFF = "off, with a notice: the KV connector would see the probes"


@pytest.fixture(scope="module")
def told(both_jobs, tiny):
    dense, is_async = tiny("dense"), {"async_scheduling": True}
    # Each job has a folder of its own.
    endpoint = "ipc://kv.sock"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "stored"},
    }
    again = crowd(60) | {"name": "again"}
    again["events"] += [{"do": "reset_prefix_cache", "reset_running_requests": False}]
    # In a pool that is short, and with prompts in chunks, stock itself loads what is not right.
    ample = {"num_gpu_blocks_override": 129, "max_num_batched_tokens": 256}
    return both_jobs(
        "told",
        [
            stage("events", dense, kv_events_config=events, **is_async) | {"listens": endpoint},
            stage(
                "example", dense, [crowd(), again], kv_transfer_config=example, **ample, **is_async
            ),
        ],
    )


def test_kv_events(told, cell):
    """What a subscriber has been told is what is cached, with blocks evicted tier by tier."""
    pair = told["events"]
    note = assert_works(pair)
    for report in (pair.stock, pair.patched):
        events = report["kv_events"]
        assert events["missed"] == events["unsaid"] == events["stale"] == 0
        assert min(events["counts"][kind] for kind in ("BlockStored", "BlockRemoved")) > 5
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(events["counts"].items()))
    cell.works("KV events", f"{note}; {counts}, none wrong or missing", probed(pair))


def test_example_connector(told, cell):
    """It stores prompts and loads them again; thoughts are not probed, and the log says so."""
    pair = told["example"]
    note = assert_works(pair, probes=False, pressed=False)
    assert_works(pair, probes=False, pressed=False, run="again")
    _, again = pair.runs("again")
    assert sum(output["cached_tokens"] for output in again["outputs"].values()) > 0
    assert NO_PROBES in pair.log
    cell.works("example connector", note, OFF)


def test_nixl(both_jobs, tiny, cell):
    """Prompts are computed by one engine and answered by another, over loopback.

    The other one probes thoughts: the connector acts on parameters of requests; probes have none.
    """
    pytest.importorskip("nixl", reason="NIXL has no wheel for this system")
    nixl = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_role": "kv_both"}
    stages = [
        stage("nixl", tiny("dense"), [streaming_crowd()], async_scheduling=True)
        # The first is not short of blocks: it keeps each prompt's until they were fetched.
        | {
            "engines": [
                {"kv_transfer_config": nixl, "num_gpu_blocks_override": 65},
                {"kv_transfer_config": nixl},
            ]
        }
    ]
    pair = both_jobs("nixl", stages, is_async=True)["nixl"]
    note = assert_cores_work(pair, number=2, probing=1, pressed=1)
    cell.works("NIXL connector, CPU to CPU", note, measured(pair))


def test_offloading(both_jobs, tiny, cell):
    """A request that is preempted has its prompt and thought loaded again, not computed."""
    tier = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 26,
            "offload_prompt_only": False,
            "spec_name": "CopiedTier",
            "spec_module_path": "copied_tier",
        },
    }
    stages = [stage("tier", tiny("dense"), kv_transfer_config=tier, async_scheduling=True)]
    pair = both_jobs("tier", stages)["tier"]
    note = assert_works(pair, probes=False)
    loaded = sum(int(count) for count in re.findall(rf"{re.escape(LOADED)}(\d+)", pair.log))
    assert loaded > 0
    cell.works("offloading connector", f"{note}; {loaded} blocks loaded again", OFF)
