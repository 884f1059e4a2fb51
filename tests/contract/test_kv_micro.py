"""`benches.py kv-micro` times what it says it times."""

import json

import benches
import pytest
from micro import kv as kv_micro

from meridian_patch.engine.kv_cache.free_queue import TieredFreeQueue
from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.policy.retention import Tier


@pytest.fixture(autouse=True)
def small_pool(monkeypatch):
    monkeypatch.setattr(kv_micro, "REQUESTS", 10)
    monkeypatch.setattr(kv_micro, "BLOCKS", 10 * kv_micro.TOKENS // kv_micro.BLOCK_SIZE)


def test_all_arms_do_the_same_work_each_with_its_own_queue():
    """Stock has no tiers; thoughts are evicted first in ours, and the pool stays sound."""
    micro = kv_micro.KVMicro()
    for _ in range(2):
        seconds = dict(micro.round())
    assert set(seconds) == {kv_micro.STOCK, kv_micro.PLAIN, kv_micro.THINKING}
    assert all(min(each.values()) > 0 for each in seconds.values())
    queues = {name: m.block_pool.free_block_queue for name, m in micro.managers.items()}
    assert not isinstance(queues[kv_micro.STOCK], TieredFreeQueue)
    assert Tier.THINK_COMPLETE in queues[kv_micro.THINKING].drain_evictions()
    assert set(queues[kv_micro.PLAIN].drain_evictions()) == {Tier.OUTPUT_CRITICAL}
    for name in (kv_micro.PLAIN, kv_micro.THINKING):
        assert find_faults(micro.managers[name].block_pool) == []


def test_the_command_writes_its_figures(tmp_path, capsys):
    """Each operation with its ratios, and how they were obtained."""
    with pytest.raises(SystemExit) as ended:
        benches.main(["kv-micro", "--rounds", "2", "--out", str(tmp_path)])
    assert ended.value.code == 0
    report = json.loads((tmp_path / "kv-micro.json").read_text())
    assert report["provenance"] == "measured-cpu"
    assert set(report["operations"]) == {"allocate", "free", "hit", "grow", "all four"}
    assert "median ratio" in capsys.readouterr().out
