"""What vLLM's offloading connector keeps, on the real scheduler: who is preempted for it."""

import __future__

import ast
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector import v1
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from meridian_patch.engine import status
from meridian_patch.engine.scheduler import offload_estimate
from meridian_patch.engine.scheduler.offload_estimate import build_reloads
from meridian_patch.replay import scheduler as replay_scheduler
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import BLOCK_SIZE, read_template_tokens
from meridian_patch.replay.types import ReplayArm, ReplayRequest

SET = "MERIDIAN_PATCH_SET_POLICY__"
# Both are let in at once, and no request is displaced.
ALONE = {f"{SET}TIME_SHARING": "false"}
POOL_BLOCKS = 50
BIG, SMALL = 500, 90


@pytest.fixture
def log(monkeypatch, caplog):
    """Our lines on the tier; vLLM's logger does not hand them on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    caplog.set_level(logging.INFO, "vllm.meridian_patch")

    def lines():
        ours = [r.getMessage() for r in caplog.records if r.name == "vllm.meridian_patch"]
        return [line for line in ours if "offload" in line or "preempted" in line]

    return lines


@pytest.fixture
def offload_prompts_alone(monkeypatch):
    """vLLM's own default, which a replay's tier does not have."""
    original = replay_scheduler.transfer_config

    def changed(arm, spec):
        config = original(arm, spec)
        config.kv_connector_extra_config["offload_prompt_only"] = True
        return config

    monkeypatch.setattr(replay_scheduler, "transfer_config", changed)


class Engine(ReplayEngine):
    """Remembers vLLM's own requests."""

    def __init__(self, settings=None, *, gb_per_s=25.0, is_async=True):
        arm = ReplayArm("arm", True, {**ALONE, **(settings or {})}, offload_gb_per_s=gb_per_s)
        step_seconds = load_cost(DEFAULT_COST).step_seconds
        super().__init__(arm, POOL_BLOCKS, step_seconds, read_template_tokens(), is_async=is_async)
        self.requests = {}
        self.offloaded_tokens = self.scheduler.policy_part._reloads

    def think(self, name, prompt, think, params=None):
        """Add a request with ``kv_transfer_params``."""
        template = read_template_tokens()
        # No two prompts begin alike.
        text = [(len(self.requests) + n) % template.content_ids for n in range(prompt - 1)]
        output = [*([7] * think), template.think_end, 8, 8, template.turn_end]
        self._sampling.extra_args = {"kv_transfer_params": params} if params else None
        self.add(ReplayRequest(name, [*text, template.think_start], output, think + 1), self.now)
        self.requests[name] = self._live[name][0]


def big_and_small(engine):
    """``big`` has computed more, and nothing of ``small`` is offload_estimate."""
    engine.think("big", BIG, 250)
    engine.think("small", SMALL, 250, {"max_offload_tokens": 0})
    return engine


def test_what_is_kept_is_told(offload_prompts_alone):
    """Whole chunks of the prompt, and nothing of a request that offloads nothing."""
    engine = big_and_small(Engine())
    kept = engine.offloaded_tokens
    big, small = engine.requests.values()
    assert kept(big) == 0
    for _ in range(20):
        engine.step()
    assert big.num_computed_tokens > BIG
    assert kept(big) == BIG // BLOCK_SIZE * BLOCK_SIZE
    assert kept(small) == 0


def test_thinking_is_kept_to_the_last_token():
    """All that are offloaded as they go are equal, at any point of a chunk."""
    engine = Engine()
    engine.think("one", BIG, 200)
    one = engine.requests["one"]
    for _ in range(5):
        engine.step()
    for _ in range(3 * BLOCK_SIZE):
        engine.step()
        assert engine.offloaded_tokens(one) == one.num_computed_tokens > BIG


@pytest.mark.parametrize(("chunk", "kept"), [(0, 0), (BIG // BLOCK_SIZE, BIG - BIG % BLOCK_SIZE)])
def test_what_the_tier_has_evicted_is_not_kept(chunk, kept):
    """Without the first chunk nothing is; without the first of the thought, the prompt is."""
    engine = Engine()
    engine.think("one", BIG, 200)
    one = engine.requests["one"]
    for _ in range(100):
        engine.step()
    side = engine.scheduler.connector.connector_scheduler
    side.manager._policy.remove(side._req_status["one"].group_states[0].offload_keys[chunk])
    slack = 2 * BLOCK_SIZE if kept else 0
    assert engine.offloaded_tokens(one) == kept + slack < one.num_computed_tokens


def test_a_displacement_costs_what_it_loses(offload_prompts_alone):
    """Time-sharing pays for the thought alone."""
    engine = Engine({f"{SET}TIME_SHARING": "true"})
    engine.think("one", BIG, 200)
    for _ in range(30):
        engine.step()
    # Nothing is in flight that writes the blocks.
    engine._deliver_down_to(0)
    room = engine.scheduler.step_limiter._displacing
    room._is_owed = lambda *_: True
    (thinker,) = room._thinkers(engine.scheduler, engine.requests["one"], 0.0)
    prompt = BIG // BLOCK_SIZE * BLOCK_SIZE
    assert thinker.held_tokens == engine.requests["one"].num_computed_tokens - prompt > 0


def test_prompts_alone_get_a_hint(offload_prompts_alone, log):
    scheduler = Engine().scheduler
    build_reloads(scheduler, is_on=True, is_reasoning=True)
    (line,) = log()
    assert '{"kv_connector_extra_config": {"offload_prompt_only": false}}' in line


@pytest.mark.parametrize("is_reasoning", [True, False])
def test_with_thinking_offloaded_there_is_no_hint(log, is_reasoning):
    assert build_reloads(Engine().scheduler, is_on=True, is_reasoning=is_reasoning)
    assert not log()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("MultiConnector", "which of its connectors would load is not known"),
        ("NixlConnector", "it is not known to load what a preempted request had computed"),
        ("LMCacheMPConnector", "it loads nothing for a preempted request"),
    ],
)
def test_other_connectors_keep_nothing(log, name, why):
    """Said once in the log, and in ``meridian status``."""
    scheduler = SimpleNamespace(
        connector=type(name, (), {})(), kv_cache_config=SimpleNamespace(kv_cache_groups=[None])
    )
    assert build_reloads(scheduler, is_on=True, is_reasoning=True) is None
    (line,) = log()
    assert f"because of its KV connector {name}: {why}" in line
    assert status._report["reload_off"] == f"{name}: {why}"
    assert status._report["reload"] is None


def test_without_a_connector_nothing_is_said(log):
    assert build_reloads(SimpleNamespace(connector=None), is_on=True, is_reasoning=True) is None
    assert not log()
    assert status._report["reload_off"] is None


def test_what_is_counted_is_told(log):
    build_reloads(Engine().scheduler, is_on=True, is_reasoning=True)
    assert status._report["reload"] == "OffloadingConnector, all tokens"
    assert status._report["reload_off"] is None


def test_lmcache_loads_nothing_for_a_preempted_request():
    """Upstream's own answer, whatever it has of the request. Its module needs the package."""
    source = Path(v1.__file__).with_name("lmcache_mp_connector.py").read_text()
    (method,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "get_num_new_matched_tokens"
    )
    names = {"RequestStatus": RequestStatus}
    code = compile(ast.unparse(method), "method", "exec", __future__.annotations.compiler_flag)
    exec(code, names)
    ask = names["get_num_new_matched_tokens"]
    connector = SimpleNamespace(_get_or_create_request_tracker=lambda request: None)
    request = SimpleNamespace(status=RequestStatus.PREEMPTED)
    assert ask(connector, request, 0) == (0, False)


@pytest.mark.parametrize(("is_tiered", "is_stored"), [("true", False), ("false", True)])
def test_a_finished_thought_is_not_stored_late(is_tiered, is_stored):
    """A tier that had no room while the request ran is not offered the thought at its end."""
    engine = Engine(
        {"MERIDIAN_PATCH_SET_KV__HISTORY": "strip", "MERIDIAN_PATCH_SET_KV__TIERS": is_tiered}
    )
    engine.think("one", 100, 200)
    side = engine.scheduler.connector.connector_scheduler
    state, store, offered = side._req_status["one"], side.manager.prepare_store, []

    def prepare_store(keys, context):
        if not engine.requests["one"].is_finished():
            return None
        offered.extend(keys)
        return store(keys, context)

    side.manager.prepare_store = prepare_store
    while not engine.is_idle:
        engine.step()
    keys = state.group_states[0].offload_keys
    kept = 99 // BLOCK_SIZE
    assert set(offered) >= set(keys[:kept])
    assert bool(set(offered) & set(keys[kept:])) is is_stored


def failed_load(engine, name, is_partial):
    report = KVConnectorOutput(finished_recving={name})
    if is_partial:
        report.invalid_block_ids = {3}
    else:
        report.failed_recving = {name}
    engine.offloaded_tokens.received(SimpleNamespace(kv_connector_output=report))


@pytest.mark.parametrize("is_partial", [True, False])
def test_after_a_failed_load_nothing_is_kept_until_one_succeeds(is_partial):
    engine = Engine()
    engine.think("one", BIG, 200)
    one, kept = engine.requests["one"], engine.offloaded_tokens
    for _ in range(20):
        engine.step()
    assert kept(one) > 0
    kept.rate.started("other", 100, 0.0)
    failed_load(engine, "other", is_partial)
    assert kept(one) == 0
    # Another request's notice is of no load here.
    kept.received(SimpleNamespace(kv_connector_output=KVConnectorOutput(finished_recving={"x"})))
    assert kept(one) == 0
    kept.rate.started("other", 100, 0.0)
    kept.received(
        SimpleNamespace(kv_connector_output=KVConnectorOutput(finished_recving={"other"}))
    )
    assert kept(one) > 0


def test_another_manager_is_refused_in_one_line(monkeypatch, log):
    """Asking the tiering manager starts a fetch."""
    scheduler = Engine().scheduler
    side = scheduler.connector.connector_scheduler
    monkeypatch.setattr(side, "manager", type("TieringOffloadingManager", (), {})())
    assert build_reloads(scheduler, is_on=True, is_reasoning=True) is None
    (line,) = log()
    assert "its manager is TieringOffloadingManager" in line


def test_a_changed_upstream_is_refused_in_one_line(monkeypatch, log):
    """Nothing is taken off, and the engine starts."""
    scheduler = Engine().scheduler
    monkeypatch.setattr(offload_estimate, "fields", lambda _: [SimpleNamespace(name="other")])
    assert build_reloads(scheduler, is_on=True, is_reasoning=True) is None
    (line,) = log()
    assert "RequestOffloadState has no group_states, req_context" in line
    monkeypatch.delattr(scheduler.connector, "connector_scheduler")
    assert build_reloads(scheduler, is_on=True, is_reasoning=True) is None
    assert "is not as expected: AttributeError" in log()[-1]
