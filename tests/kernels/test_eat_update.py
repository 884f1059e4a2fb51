"""eat_update against one Python object per slot, over many steps."""

import math

import kernel_references
import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, TYPES, indices, random_logits, same_bits
from kernel_references import EatSlot

from meridian_patch.exit.strategies.eat import Eat
from meridian_patch.kernels.eat_update import EatColumn, eat_update, eat_update_ref
from meridian_patch.kernels.row_signals import Signal, row_signals

SETTINGS = {"alpha": 0.2, "warm_up": 5, "max_entropy": 3.0}


def new_state(num_slots: int, delta: float = 1e-3) -> torch.Tensor:
    state = torch.zeros(num_slots, len(EatColumn), device=DEVICE)
    state[:, EatColumn.DELTA] = delta
    return state


def logits_of_entropy(*entropies: float) -> torch.Tensor:
    """Rows of 64 logits with the given entropies in nats, below log 64; NaN gives a row of NaN."""
    return torch.stack([_row_of_entropy(entropy) for entropy in entropies]).to(DEVICE)


def _row_of_entropy(entropy: float) -> torch.Tensor:
    if math.isnan(entropy):
        return torch.full((64,), math.nan)
    ramp = torch.linspace(0, 1, 64, dtype=torch.float64)
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        too_flat = kernel_references.row_signals((ramp * middle).numpy(), 0)[0] > entropy
        low, high = (middle, high) if too_flat else (low, middle)
    return (ramp * low).float()


def column(state: torch.Tensor, which: EatColumn) -> list[float]:
    return state[:, which].tolist()


def assert_same_state(state: torch.Tensor, slots: list[EatSlot], settings: dict) -> None:
    got = state.double().cpu().numpy()
    want = np.array([slot.columns() for slot in slots])
    np.testing.assert_allclose(got[:, :-1], want[:, :-1], rtol=2e-5, atol=2e-6)
    for flag, slot in zip(got[:, -1], slots, strict=True):
        if not is_close_call(slot, settings["max_entropy"]):
            assert flag == slot.converged


def is_close_call(slot: EatSlot, max_entropy: float) -> bool:
    """Whether rounding may decide."""
    last = slot.entropies[-1] if slot.entropies else 0.0
    return abs(slot.debiased - slot.delta) < 1e-5 or abs(last - max_entropy) < 1e-4


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int, dtype: torch.dtype, backend: str) -> None:
    """Slots that are still, wander or are confused, probed in random groups, some rows NaN."""
    rng = np.random.default_rng(seed)
    settings = {
        "alpha": float(rng.uniform(0.05, 0.5)),
        "warm_up": int(rng.integers(1, 12)),
        "max_entropy": 3.0,
    }
    deltas = [0.0, 1e-4, 1e-2, 1e-2, 1.0, 1.0]
    unrest = [0.1, 0.0, 0.01, 0.5, 0.1, 3.0]
    base = rng.normal(size=(6, 300)) * np.array([1, 2, 4, 8, 4, 0.1])[:, None]
    reference = [EatSlot(float(np.float32(delta))) for delta in deltas]
    state = new_state(6)
    state[:, EatColumn.DELTA] = torch.tensor(deltas)
    flags = 0
    for _ in range(40):
        slots = rng.permutation(6)[: rng.integers(0, 7)]
        noise = np.array(unrest)[:, None] * rng.normal(size=(6, 300))
        logits = torch.tensor(base + noise).to(DEVICE, dtype)
        logits[torch.tensor(rng.random(6) < 0.1)] = torch.nan
        eat_update(state, logits, indices(*slots), indices(*slots), **settings, backend=backend)
        exact = logits.double().cpu().numpy()
        for slot in slots:
            entropy = kernel_references.row_signals(exact[slot], 0)[0]
            reference[slot].probe(entropy, **settings)
        assert_same_state(state, reference, settings)
        flags += int(state[:, EatColumn.CONVERGED].sum())
    assert flags, "no slot ever converged: this test looks at half of the rule"


def test_formula_by_hand(backend: str) -> None:
    """Entropies 1, 2, 2 with alpha 1/2: each number as the formula in the module gives it."""
    state = new_state(1)
    settings = {"alpha": 0.5, "warm_up": 2, "max_entropy": 9.0}
    seen = []
    for entropy in (1.0, 2.0, 2.0):
        logits = logits_of_entropy(entropy)
        eat_update(state, logits, indices(0), indices(0), **settings, backend=backend)
        seen.append(state[0, 1:5].tolist())
    assert seen[0] == pytest.approx([1, 1, 0, math.inf], rel=1e-5)
    assert seen[1] == pytest.approx([2, 1.5, 0.125, 0.125 / 0.75], rel=1e-5)
    assert seen[2] == pytest.approx([2, 1.75, 0.09375, 0.09375 / 0.875], rel=1e-5)


@pytest.mark.parametrize(("warm_up", "first"), [(1, 2), (2, 3), (4, 5)])
def test_warm_up(warm_up: int, first: int, backend: str) -> None:
    """A chain that never moves converges with the first probe after the warm-up."""
    state, logits = new_state(1), logits_of_entropy(1.0)
    settings = {"alpha": 0.2, "warm_up": warm_up, "max_entropy": 3.0}
    flags = []
    for _ in range(5):
        eat_update(state, logits, indices(0), indices(0), **settings, backend=backend)
        flags.append(bool(state[0, EatColumn.CONVERGED]))
    assert flags == [probe >= first for probe in range(1, 6)]


def test_conditions_apart(backend: str) -> None:
    """Stably confused does not converge, nor does a slot without its delta; flags are not kept."""
    state = new_state(3)
    state[2, EatColumn.DELTA] = 0.0
    still = logits_of_entropy(1.0, 3.5, 1.0)
    all_three = indices(0, 1, 2)
    for _ in range(8):
        eat_update(state, still, all_three, all_three, **SETTINGS, backend=backend)
    assert column(state, EatColumn.CONVERGED) == [1, 0, 0]
    eat_update(state, logits_of_entropy(2.5), indices(0), indices(0), **SETTINGS, backend=backend)
    assert column(state, EatColumn.CONVERGED) == [0, 0, 0]


def test_nan_changes_nothing(backend: str) -> None:
    """Neither statistics nor the flag, on a fresh slot or on a converged one."""
    state, logits = new_state(2), logits_of_entropy(1.0, math.nan)
    for _ in range(6):
        eat_update(state, logits, indices(0), indices(0), **SETTINGS, backend=backend)
    assert column(state, EatColumn.CONVERGED) == [1, 0]
    before = state.clone()
    eat_update(state, logits, indices(1, 1), indices(0, 1), **SETTINGS, backend=backend)
    assert same_bits(state, before)


def test_index_outside_changes_nothing(backend: str) -> None:
    """Neither a slot nor what lies before and behind the state."""
    wide, logits = new_state(5), random_logits(3, 1000, torch.float32)
    state, before = wide[1:4], wide.clone()
    rows, slots = indices(-1, 3, 0, 1, -1), indices(0, 1, -1, 3, -1)
    eat_update(state, logits, rows, slots, **SETTINGS, backend=backend)
    assert same_bits(wide, before)
    eat_update(state, logits, indices(-1, 1, 1), indices(-1, 2, -1), **SETTINGS, backend=backend)
    assert column(wide, EatColumn.COUNT) == [0, 0, 0, 1, 0]


def test_slots_do_not_mix(backend: str) -> None:
    """In one call or in several, in any order: the same bits, and others' slots stay."""
    logits = random_logits(4, 1000, torch.bfloat16)
    together, apart = new_state(6), new_state(6)
    rows, slots = (2, 0, 3), (5, 1, 0)
    for _ in range(3):
        eat_update(together, logits, indices(*rows), indices(*slots), **SETTINGS, backend="triton")
        for row, slot in reversed(list(zip(rows, slots, strict=True))):
            one = indices(row), indices(slot)
            eat_update(apart, logits, *one, **SETTINGS, backend="triton")
    assert same_bits(together, apart)
    assert column(together, EatColumn.COUNT) == [3, 3, 0, 0, 0, 3]
    reference = eat_update_ref(new_state(6), logits, indices(*rows), indices(*slots), **SETTINGS)
    once = eat_update(
        new_state(6), logits, indices(*rows), indices(*slots), **SETTINGS, backend=backend
    )
    torch.testing.assert_close(once.double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_cols", [7, 32000, 151936])
def test_entropy_is_that_of_row_signals(n_cols: int) -> None:
    logits, both = random_logits(2, n_cols, torch.bfloat16), indices(0, 1)
    state = eat_update(new_state(2), logits, both, both, **SETTINGS)
    signals = row_signals(logits, both, 0)
    torch.testing.assert_close(state[:, EatColumn.ENTROPY], signals[:, Signal.ENTROPY])


def test_padded_state_and_no_probes(backend: str) -> None:
    """The state may be a slice of something wider; a call without rows does nothing; int32."""
    wide = torch.full((2, 9), 5.0, device=DEVICE)
    state = wide[:, :7]
    state[:] = new_state(2)
    logits = random_logits(2, 1000, torch.float32)
    assert eat_update(state, logits, indices(), indices(), **SETTINGS, backend=backend) is state
    assert same_bits(state.contiguous(), new_state(2))
    one = indices(0, dtype=torch.int32), indices(1, dtype=torch.int32)
    eat_update(state, logits, *one, **SETTINGS, backend=backend)
    assert column(state, EatColumn.COUNT) == [0, 1]
    assert bool((wide[:, 7:] == 5).all())


@pytest.mark.parametrize("seed", range(3))
def test_converges_where_the_engines_strategy_does(seed: int, backend: str) -> None:
    """The engine keeps EAT's state in ``exit.eat``; probe by probe both say the same."""
    rng = np.random.default_rng(seed)
    settings = {"alpha": 0.2, "warm_up": 3, "max_entropy": 2.0}
    state, strategy = new_state(1, delta=0.05), Eat(0.2, 0.05, 3, 2.0)
    verdicts = []
    for index in range(40):
        # Unsure, then still, then unsure again.
        width = 0.02 if 12 <= index < 28 else 1.0
        entropy = float(np.clip(1.0 + width * rng.normal(), 0.1, 3.5))
        logits = logits_of_entropy(entropy)
        eat_update(state, logits, indices(0), indices(0), **settings, backend=backend)
        verdicts.append(strategy.probed(entropy) is not None)
        assert bool(state[0, EatColumn.CONVERGED]) == verdicts[-1]
    assert {True, False} <= set(verdicts)
