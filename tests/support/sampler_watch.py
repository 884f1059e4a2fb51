"""Watches what model runner V2's sampler finds in its batches; sent to the worker by name."""


def watch(worker) -> None:
    """Record, by step, whether a request of the batch is greedy or has a seed of its own."""
    states = worker.model_runner.sampler.sampling_states
    seen = worker.seen_by_sampler = {"any_greedy": [], "any_explicit_seed": []}
    for name, answers in seen.items():
        setattr(states, name, _recorded(getattr(states, name), answers))


def seen(worker) -> dict:
    return worker.seen_by_sampler


def _recorded(method, answers):
    def call(idx_mapping):
        answers.append(bool(method(idx_mapping)))
        return answers[-1]

    return call
