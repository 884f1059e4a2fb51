"""Lets a CPU host run what vLLM keeps for GPUs: Model Runner V2 and asynchronous scheduling.

Called in the child process before anything of vLLM is imported. On a CUDA machine nothing is
replaced: engines there run Triton, streams and events as they are.
"""

from typing import Self

import torch


def add_triton_cpu_backend() -> None:
    """Make vLLM believe that Triton can run here, so that Model Runner V2 may be chosen.

    With ``TRITON_INTERPRET=1`` every kernel then runs in Triton's interpreter: slow, but it is the
    code path GPUs take.
    """
    if torch.cuda.is_available():
        return
    from triton import backends

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=ActiveDriver)
    _take_any_mask()


def _take_any_mask() -> None:
    """The interpreter wants masks of bool, compilers take integers: vLLM's bit masks are."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self, ptrs, mask, *args):
        return load(self, ptrs, _as_bool(mask), *args)

    def masked_store(self, ptrs, value, mask, *args):
        return store(self, ptrs, value, _as_bool(mask), *args)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store


def _as_bool(mask):
    mask.data = mask.data.astype(bool)
    return mask


def allow_async_scheduling() -> None:
    """Keep ``async_scheduling=True``, which the CPU platform switches off after validation.

    The runner then wants a CUDA stream and event to copy sampled tokens; on the CPU they are
    there when the sampler returns, so stand-ins that do nothing are right.
    """
    if torch.cuda.is_available():
        return
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_keep)
    torch.cuda.Event = _Event
    torch.cuda.Stream = _Stream
    torch.cuda.stream = lambda _: _Stream()
    torch.cuda.current_stream = lambda *_: _Stream()


def add_gloo_gatherv() -> None:
    """Let ranks of data parallelism share their experts over gloo: vLLM's CPU build cannot.

    Rows are padded to the longest rank's, as gloo gathers equal sizes alone.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather_one(self, rows, sizes):
        sizes = sizes or [rows.shape[0]] * self.world_size
        padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        if isinstance(input_, torch.Tensor):
            return gather_one(self, input_, sizes)
        return [gather_one(self, each, sizes) for each in input_]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        summed = input_.clone()
        torch.distributed.all_reduce(summed, group=self.device_group)
        begin = sum(sizes[: self.rank_in_group])
        return summed[begin : begin + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def start_ray(workers: int) -> None:
    """Start Ray on this machine with places for so many workers, and let vLLM use it on the CPU.

    vLLM gives each worker an accelerator of Ray's; here these are names without a device.
    """
    import ray

    allow_ray()
    hook = {"worker_process_setup_hook": "cpu_engine.allow_ray"}
    ray.init(num_cpus=workers, num_gpus=workers, runtime_env=hook, include_dashboard=False)


def allow_ray() -> None:
    """Name the accelerator that a worker stands for; in Ray's processes too."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def profile(worker) -> None:
    """Run a worker's model once on nothing, as vLLM does at the start of every GPU worker.

    Without it the second worker of a pipeline has nowhere to put what the first one sends: vLLM's
    CPU worker leaves it out where nothing is compiled.
    """
    worker.model_runner.profile_run()


class _Event:
    def __init__(self, *args, **kwargs) -> None:
        """Accepts what ``torch.cuda.Event`` accepts."""

    def record(self, *args) -> None:
        """Nothing to order on the CPU."""

    def synchronize(self) -> None:
        """Nothing to wait for on the CPU."""


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *args, **kwargs) -> None:
        """Accepts what ``torch.cuda.Stream`` accepts."""

    def wait_stream(self, *args) -> None:
        """Nothing to wait for on the CPU."""

    def wait_event(self, *args) -> None:
        """Nothing to wait for on the CPU."""

    def synchronize(self) -> None:
        """Nothing to wait for on the CPU."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args) -> None:
        """Nothing to restore."""
