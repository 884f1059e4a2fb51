"""A machine whose step times follow a roofline, and a model that has watched it."""

import random

from meridian_patch.policy.step_time import StepShape, StepTimeModel


def roofline(shape: StepShape, speed: float = 1.0) -> float:
    memory = 6e-3 + 4e-8 * shape.context_tokens + 1e-5 * shape.decode_tokens
    tokens = shape.prefill_tokens + shape.decode_tokens
    compute = 1e-3 + 3e-5 * tokens + 1e-9 * shape.attended_tokens
    return max(memory, compute) * speed


def random_shape(rng: random.Random, prefill: int | None = None) -> StepShape:
    tokens = rng.choice((0, 0, 256, 512, 2048)) if prefill is None else prefill
    before = rng.randrange(8000) if tokens else 0
    attended = tokens * before + tokens * (tokens + 1) // 2
    return StepShape(tokens, rng.randrange(1, 100), rng.randrange(10_000, 90_000), attended)


def trained(steps: int = 400, speed: float = 1.0) -> StepTimeModel:
    rng, model = random.Random(0), StepTimeModel()
    for _ in range(steps):
        shape = random_shape(rng)
        model.observe(shape, roofline(shape, speed) * rng.uniform(0.98, 1.02))
    return model
