"""`bench serve --emulate --fidelity`: an emulated run against its replay."""

import random
from dataclasses import replace

import pytest

from meridian_patch.bench.served.arms import KNOWN_ARMS
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.fidelity import BARS, compare, fidelity_table
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import ArmRun, SeedRun
from meridian_patch.bench.served.workload import ServedRequest
from meridian_patch.emulation.device import load_device
from meridian_patch.replay.scheduler import read_template_tokens

DEVICE = load_device("h100-32b-dense")
SETTINGS = ServerSettings(
    model="tiny-reasoner",
    kv_blocks=24,
    block_size=32,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    max_model_len=600,
    extra=("--max-num-seqs", "8"),
    device=DEVICE,
)


def a_run(seed: int) -> SeedRun:
    """Requests as clients would have them from a server that is never fast enough."""
    rng, template = random.Random(seed), read_template_tokens()
    records = []
    for number in range(12):
        thought = [65] * rng.randrange(40, 150)
        tokens = [*thought, template.think_end, *[66] * 20, template.turn_end]
        submit_s = 0.05 * number
        request = ServedRequest(f"{seed}-{number}", submit_s, (), "", 512)
        record = RequestRecord(request, submit_s, tokens, finish_reason="stop")
        record.prompt_ids = [rng.randrange(60, 120) for _ in range(rng.randrange(20, 300))]
        record.token_s = [submit_s + 1 + 0.1 * place for place in range(len(tokens))]
        records.append(record)
    return SeedRun(seed, (template.think_end,), records, {"preemptions": 3.0}, is_complete=True)


@pytest.mark.parametrize("arm", ["stock", "patched"])
def test_a_run_as_the_replay_has_it_has_no_error(arm):
    """What a replay of it gives, replayed once more, is the same in each figure."""
    from meridian_patch.bench.served import fidelity

    environment = KNOWN_ARMS[arm].environment
    replayed = fidelity._replayed(
        [a_run(1), a_run(2)], fidelity._arm(arm, environment), SETTINGS, DEVICE
    )
    assert replayed[0].records[0].token_s[0] > 0
    # In the pool of 24 blocks, with the last of two numbers of seats.
    assert sum(seed.counters["preemptions"] for seed in replayed) > 0
    found = compare(ArmRun(arm, seeds=replayed), environment, SETTINGS)
    assert [each.figure for each in found] == list(BARS)
    assert [each.error for each in found] == pytest.approx([0.0] * len(BARS), abs=1e-6)
    assert len(fidelity_table(found, "emulated").rows) == len(BARS)


def test_a_server_that_took_longer_is_seen():
    found = compare(ArmRun("stock", seeds=[a_run(1)]), KNOWN_ARMS["stock"].environment, SETTINGS)
    errors = {each.figure: each.error for each in found}
    assert errors["answer_itl_p50_s"] > BARS["answer_itl_p50_s"]
    assert errors["tokens_per_s"] < -BARS["tokens_per_s"]


def test_what_a_replay_cannot_show_is_left_out():
    """An arm that closes thoughts, and a server without a device."""
    run = ArmRun("exit", seeds=[a_run(1)])
    assert not compare(run, {"MERIDIAN_PATCH_CONFIG": "profile.yaml"}, SETTINGS)
    assert not compare(run, {}, replace(SETTINGS, device=None))
