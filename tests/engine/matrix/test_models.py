"""Kinds of models: what their KV caches allow is on, and what they do not allow says so."""

import pytest
from matrix_checks import assert_healthy, assert_works, probed
from matrix_plans import cell as stage
from matrix_plans import crowd
from tiny_vlm import IMAGE, IMAGE_TOKENS, make_vlm
from workloads import sample

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

# Blocks of KV cache that are too few for the crowd; where several groups share them, or blocks are
# smaller, the same is more.
POOLS = {"moe": 11, "sliding": 11, "two_groups": 24, "convolution": 24, "mla": 24}
HYBRID = {"num_gpu_blocks_override": 24, "async_scheduling": True}
GROUPS = "EAT is off, thoughts are not probed: the model has several groups of KV cache"
OFF = f"off, with a notice: {GROUPS.partition(': ')[2]}"
UNCACHED = "EAT is off, thoughts are not probed: prefix caching is off"
NO_TIERS = "KV tiers are inactive: prefix caching is off"


@pytest.fixture(scope="module")
def kinds(both_jobs, tiny):
    short = crowd(40) | {"events": []}
    return both_jobs(
        "models",
        [
            stage(kind, tiny(kind), num_gpu_blocks_override=blocks, async_scheduling=True)
            for kind, blocks in POOLS.items()
        ]
        + [
            stage(f"{kind}_alone", tiny(kind), [short], max_num_seqs=1, **HYBRID)
            for kind in ("mla", "convolution")
        ]
        + [
            stage("mamba", tiny("mamba"), enable_prefix_caching=False, **HYBRID),
            stage("mamba_cached", tiny("mamba"), **HYBRID),
        ],
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [("moe", "mixture of experts"), ("sliding", "sliding window in every layer")],
)
def test_one_group_of_kv_cache(kinds, cell, kind, name):
    """Nothing is switched off."""
    pair = kinds[kind]
    cell.works(name, assert_works(pair), probed(pair))


def test_several_groups_of_kv_cache(kinds, cell):
    """Scheduling and tiers work; thoughts are not probed, and the log says why."""
    pair = kinds["two_groups"]
    note = assert_works(pair, probes=False)
    assert GROUPS in pair.log
    cell.works("sliding window and full attention", note, OFF)


def test_short_convolution(kinds, cell):
    note = assert_works_alone(kinds["convolution_alone"], kinds["convolution"])
    assert GROUPS in kinds["convolution"].log
    cell.works("hybrid, short convolution and attention", note, OFF)


def test_mamba_without_prefix_caching(kinds, cell):
    pair = kinds["mamba"]
    note = assert_works(pair, probes=False)
    assert UNCACHED in pair.log
    name = "hybrid, mamba 2 and attention, prefix caching off"
    cell.works(name, f"{note}; tiers off, with a notice", "off, with a notice")


def test_mamba(kinds, cell):
    """vLLM's CPU kernel returns one state per prompt where its caller takes one per chunk."""
    pair = kinds["mamba_cached"]
    for report in (pair.stock, pair.patched):
        assert report["error"].startswith("IndexError")
        assert "varlen_states[last_chunk_indices_p]" in report["trace"]
    reason = "stock vLLM fails as well: its CPU kernel has no states within a prompt to cache"
    cell.cannot_run("hybrid, mamba 2 and attention", reason)


def assert_works_alone(alone, pair) -> str:
    """Of a kind whose tokens depend on what runs beside a request, in stock as well.

    So outputs are compared where requests run one at a time; of the crowd it is seen that all end
    and nothing is left.
    """
    note = assert_works(alone, probes=False, pressed=False)
    (single, _), (stock, patched) = alone.runs("crowd"), pair.runs("crowd")
    beside = {name: sample(stock, name)["ids"][:20] for name in stock["outputs"]}
    assert any(sample(single, name)["ids"][:20] != ids for name, ids in beside.items())
    assert_healthy(patched)
    assert stock["preemptions"]
    assert all(
        output["finished"] or name.startswith("leaver")
        for name, output in patched["outputs"].items()
    )
    note = note.partition(";")[0]
    return f"one at a time: {note}; at once stock is not equal to itself, and all requests end"


def test_mla(kinds, cell):
    """On a CPU vLLM runs MLA without prefix caching; the log says what is off."""
    note = assert_works_alone(kinds["mla_alone"], kinds["mla"])
    assert UNCACHED in kinds["mla"].log
    assert NO_TIERS in kinds["mla"].log
    note = f"{note}; tiers off, with a notice"
    cell.works("MLA", note, "off, with a notice: vLLM caches no prefixes here")


@pytest.fixture(scope="module")
def others(both_jobs, tiny, demo_model, tmp_path_factory):
    seeing = tmp_path_factory.mktemp("model") / "seeing-tiny-reasoner"
    make_vlm(demo_model, seeing)
    looks = crowd(60)
    for number, request in enumerate(looks["requests"]):
        if number % 2:
            request["image"] = number % 3
            request["messages"][-1]["content"] += IMAGE
    # Without torchvision vLLM's own LLaVA does not load.
    small = {"model_impl": "transformers", "max_num_batched_tokens": IMAGE_TOKENS}
    pooled = crowd(1)
    for request in pooled["requests"]:
        request["pooling"] = {"task": "embed"}
    pooling = {"runner": "pooling", "convert": "embed"}
    return both_jobs(
        "others",
        [
            stage("pooling", tiny("dense"), [pooled], **pooling),
            stage(
                "seeing",
                seeing,
                [looks],
                num_gpu_blocks_override=14,
                max_model_len=320,
                async_scheduling=True,
                **small,
            ),
        ],
    )


def test_multi_modal(others, cell):
    """Requests with pictures and without, the encoder's cache for one picture at a time."""
    pair = others["seeing"]
    note = assert_works(pair)
    _, patched = pair.runs("crowd")
    assert len(patched["encoded"]) > 2
    assert "probe" not in patched["encoded"]
    cell.works("multi-modal", note, probed(pair))


def test_pooling(others, cell):
    """Nothing thinks there: every decision is vLLM's own."""
    pair = others["pooling"]
    stock, patched = pair.runs("crowd")
    assert any("PhaseSchedul" in name for name in pair.patched["scheduler"])
    vectors = {name: output["pooled"] for name, output in patched["outputs"].items()}
    assert vectors == {name: output["pooled"] for name, output in stock["outputs"].items()}
    assert len({tuple(vector) for vector in vectors.values()}) == len(vectors) > 8
    assert patched["probes"] == []
    assert patched["planned"] == 0
    assert_healthy(patched)
    cell.works("pooling model", f"{len(vectors)} vectors as stock", "nothing thinks")
