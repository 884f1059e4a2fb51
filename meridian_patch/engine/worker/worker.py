"""The worker with a tap on its model runner: signals of chosen rows go back to the scheduler.

Runs in every process that has a worker: EngineCore itself, or one per GPU.
"""

from typing import Any

from vllm.logger import init_logger

from meridian_patch.engine.worker.logits_tap import Tap

logger = init_logger("vllm.meridian_patch")

# What a model runner of either generation has, and one from elsewhere may not.
NEEDED = ("device", "execute_model", "sample_tokens")


def build_tapped_worker(original: type) -> type:
    """``original``, the base of all workers, with a tap put on whatever runner it is given.

    Load-bearing: a worker's process loads plug-ins in ``WorkerWrapperBase.init_worker``, when the
    wrapper is there already, and only then imports the worker's class, which derives from what
    the site holds. The wrapper itself would be replaced too late in a spawned process.
    """

    class TappedWorkerBase(original):
        # Load-bearing: the runner is assigned once, when the device and the ranks are known.
        @property
        def model_runner(self) -> Any:
            return self._runner

        @model_runner.setter
        def model_runner(self, runner: Any) -> None:
            self._runner = runner
            samples = runner is not None and self.model_config.runner_type == "generate"
            if samples and answers_scheduler(self.rank, self.parallel_config):
                put_tap(runner, self.model_config)

    return TappedWorkerBase


def answers_scheduler(rank: int, parallel: Any) -> bool:
    """True for the worker whose outputs a scheduler reads; only there logits are measured."""
    # Load-bearing: with an external launcher every worker has a scheduler of its own, and all
    # must decide alike.
    if parallel.distributed_executor_backend == "external_launcher":
        return True
    # Load-bearing: the executors' choice, the first rank of the last pipeline stage.
    stage_size = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return bool(rank == parallel.world_size - stage_size)


def put_tap(runner: Any, model_config: Any) -> None:
    """Let the runner's steps pass through a tap of its own.

    The methods are replaced on the runner and not on the worker, because Ray's compiled graph
    calls the runner itself.
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
    # Before the engine serves, and before vLLM watches for kernels that compile while it does.
    tap.warm_up(runner.device, {model_config.dtype, model_config.head_dtype})
    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        tap.begin(scheduler_output)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample(grammar_output: Any) -> Any:
        return tap.end(sample_tokens(grammar_output))

    runner.execute_model, runner.sample_tokens = execute, sample
