"""Watches what model runner V2's sampler finds in its batches; sent to the worker by name."""


def watch(worker) -> None:
    """Record, by step, whether a request of the batch is greedy or has a seed of its own.

    The sampler asks for both only where top-k or top-p is in use, whose kernels Triton's
    interpreter does not run; here they are asked of the same batches.
    """
    states = worker.model_runner.sampler.sampling_states
    seen = worker.seen_by_sampler = {"any_greedy": [], "any_explicit_seed": []}
    look_up = states.get_top_k_top_p

    def recorded(expanded_idx_mapping, idx_mapping_np):
        for name, answers in seen.items():
            answers.append(bool(getattr(states, name)(idx_mapping_np)))
        return look_up(expanded_idx_mapping, idx_mapping_np)

    states.get_top_k_top_p = recorded


def seen(worker) -> dict:
    return worker.seen_by_sampler
