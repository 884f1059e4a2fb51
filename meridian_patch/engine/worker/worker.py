"""Prepares what a worker builds: a tap on its model runner, and the thread of its KV connector.

The tap sends signals of chosen rows to the scheduler.

Runs in every process that has a worker: EngineCore itself, or one process per GPU.
"""

from typing import Any

from vllm.logger import init_logger

from meridian_patch.engine import status
from meridian_patch.engine.handoff.nixl_wait import let_nixl_wait
from meridian_patch.engine.worker.logits_tap import Tap

logger = init_logger("vllm.meridian_patch")

# Attributes of both of vLLM's model runners, which a third-party runner may lack.
NEEDED = ("device", "execute_model", "sample_tokens")


def build_tapped_worker(original: type) -> type:
    """``original``, the base class of all workers, with a tap on the runner that it is given.

    Load-bearing: a worker process loads plug-ins in ``WorkerWrapperBase.init_worker`` and only
    then imports the worker's class, which derives from this replacement. The wrapper itself exists
    before plug-ins are loaded, so in a spawned process it would be replaced too late.
    """

    class TappedWorkerBase(original):
        # Load-bearing: the runner is assigned once, after the device and the ranks are known.
        @property
        def model_runner(self) -> Any:
            return self._runner

        @model_runner.setter
        def model_runner(self, runner: Any) -> None:
            self._runner = runner
            if runner is not None:
                # In EngineCore's own process its scheduler, built later, says what it is.
                status.publish(role="worker", rank=self.rank)
                # Load-bearing: connectors are built later, with the KV cache.
                let_nixl_wait(self.vllm_config)
            samples = runner is not None and self.model_config.runner_type == "generate"
            if samples and answers_scheduler(self.rank, self.parallel_config):
                put_tap(runner, self.model_config)

    return TappedWorkerBase


def answers_scheduler(rank: int, parallel: Any) -> bool:
    """Whether a scheduler reads this worker's outputs; only such workers measure logits."""
    # Load-bearing: with an external launcher every worker has its own scheduler, and all must
    # decide alike.
    if parallel.distributed_executor_backend == "external_launcher":
        return True
    # Load-bearing: executors read the output of the first rank of the last pipeline stage.
    stage_size = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return bool(rank == parallel.world_size - stage_size)


def put_tap(runner: Any, model_config: Any) -> None:
    """Wrap the runner's methods with a new tap.

    The methods are replaced on the runner and not on the worker, because Ray's compiled graph
    calls the runner directly.
    """
    missing = [name for name in NEEDED if not hasattr(runner, name)]
    if missing:
        logger.warning(
            "meridian_patch: %s measures no signals: it has no %s",
            type(runner).__name__,
            ", ".join(missing),
        )
        return
    tap = Tap(runner, model_config.get_vocab_size())
    # Compile before the engine serves, and before vLLM starts to warn of kernels compiled late.
    tap.warm_up(runner.device, {model_config.dtype, model_config.head_dtype})
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        tap.begin(scheduler_output)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample(grammar_output: Any) -> Any:
        return tap.end(sample_tokens(grammar_output))

    runner.execute_model, runner.sample_tokens = execute, sample
