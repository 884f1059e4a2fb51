"""What is bound in the worker process: the patch of its class, and rebound instances."""

from typing import Final

from meridian_patch.patches.lock import SUPPORTED
from meridian_patch.patching.spec import Contract, Patch, Rebinding, Site

RUNNER_V1: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2: Final = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

NIXL_WORKER: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"

WORKER: Final = Patch(
    name="worker",
    sites=(
        Site("vllm.v1.worker.worker_base", "WorkerBase"),
        # For annotations alone, but a name that still holds the original is reported as stale.
        Site("vllm.v1.executor.abstract", "WorkerBase"),
        Site("vllm.v1.engine.llm_engine", "WorkerBase"),
    ),
    build="meridian_patch.engine.worker.worker:build_tapped_worker",
    versions=SUPPORTED,
    contract=Contract(
        calls=(),
        behaviour=("__init__",),
        reads=("model_config", "model_runner", "parallel_config", "rank", "vllm_config"),
        # It loads the plug-ins, then imports the worker's class, which derives from the site's.
        lookups=("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",),
        collaborators=(
            f"{NIXL_WORKER}:NixlBaseConnectorWorker.__init__",
            "vllm.v1.worker.gpu_worker:Worker.init_device",
            "vllm.v1.executor.multiproc_executor:MultiprocExecutor._get_output_rank",
            f"{RUNNER_V1}._sample",
            f"{RUNNER_V1}.sample_tokens",
            "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output",
            "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
            f"{RUNNER_V2}.sample",
            f"{RUNNER_V2}.sample_tokens",
            "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
            "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
        ),
    ),
    process="worker",
    why=(
        "Early exit needs the entropy of what the model says next. The subclass puts a tap on the "
        "model runner, which measures the rows that the scheduler asks for, from the logits that "
        "are sampled from, and sends the numbers with the step's output. Before the KV connector "
        "is built, it lets NIXL's thread wait for events (`handoff.nixl_wait_ms`)."
    ),
    upstream="none: a logits processor returns nothing, and log-probabilities hold no entropy",
    remove_when="vLLM lets a plug-in send values of its own from the sampler to the scheduler",
)

PATCHES: Final = (WORKER,)

TAP: Final = "meridian_patch.engine.worker.logits_tap"

REBINDINGS: Final = (
    *(
        Rebinding(
            owner=runner,
            attributes=("execute_model", "sample_tokens"),
            places=("meridian_patch.engine.worker.worker:put_tap",),
            process="worker",
            lasts="as long as the model runner",
            why=(
                "Takes the plan of a step, and attaches its signals. Ray's compiled graph calls "
                "the runner directly, so a method of the worker would be passed over."
            ),
        )
        for runner in (RUNNER_V1, RUNNER_V2)
    ),
    Rebinding(
        owner=RUNNER_V1,
        attributes=("_sample",),
        places=(f"{TAP}:Tap._fit",),
        process="worker",
        lasts="from the first measured step on, as long as the model runner",
        why="Measures the logits that are sampled from; vLLM has no hook there.",
    ),
    *(
        Rebinding(
            owner=sampler,
            attributes=("__class__",),
            places=(f"{TAP}:_call_before",),
            process="worker",
            lasts="from the first measured step on, as long as the model runner",
            why=(
                "The same for model runner V2, which passes the logits to a callable object and to "
                "nothing else. Python looks `__call__` up on the class."
            ),
        )
        for sampler in (
            "vllm.v1.worker.gpu.sample.sampler:Sampler",
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler",
        )
    ),
    Rebinding(
        owner="vllm.v1.outputs:AsyncModelRunnerOutput",
        attributes=("get_output",),
        places=(f"{TAP}:Tap._attach_later", f"{TAP}:Tap._attach_later.get_output"),
        process="worker",
        lasts="until it is called, once",
        why="Attaches signals when the output is read, so that the GPU is not waited for.",
    ),
    Rebinding(
        owner=NIXL_WORKER,
        attributes=("NixlWrapper",),
        places=(
            "meridian_patch.engine.handoff.nixl_wait:let_nixl_wait",
            "meridian_patch.engine.handoff.nixl_wait:let_nixl_poll",
        ),
        process="worker",
        lasts="until the next engine of the process, or until the patches are undone",
        why="NIXL's thread waits for events, for a time that the engine's configuration sets.",
    ),
    Rebinding(
        owner="nixl._bindings",
        attributes=("nixlAgentConfig",),
        places=("meridian_patch.engine.handoff.nixl_wait:_waiting",),
        process="worker",
        lasts="while an agent of NIXL is built",
        why="NIXL's constructor sets the time that its thread waits, and takes no argument for it.",
    ),
)
