"""vLLM's scheduler and output processor with ours in their place, and the wire between them."""

from scheduler_driver import THINK_END, THINK_START, WORD, Driver, Job, engine_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import output_processor as upstream
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from meridian_patch.engine.api import reasoning_usage
from meridian_patch.engine.api.phase_times import times_of
from meridian_patch.engine.api.request_state import build_request_state
from meridian_patch.engine.api.tracing import build_output_processor
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.patching.candidate import MARK

THINKS, PLAIN = (WORD, WORD, THINK_START), (WORD, WORD, WORD)


def patch_output_processor(monkeypatch, demo_model):
    """Put ours in the place of vLLM's output processor and request states."""
    reasoning_usage.responses_config.cache_clear()
    # The first configuration loads the plug-ins, which may patch this process.
    engine_config(demo_model, is_async=False, blocks=200)
    for name, build in (
        ("RequestState", build_request_state),
        ("OutputProcessor", build_output_processor),
    ):
        if not hasattr(getattr(upstream, name), MARK):
            ours = build(getattr(upstream, name))
            setattr(ours, MARK, name)
            monkeypatch.setattr(upstream, name, ours)


def core_request(name, prompt, params, external_id, *, is_session=False):
    """A text request as an API server sends it to EngineCore."""
    made = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=is_session,
    )
    made.external_req_id = external_id
    return made


class Served:
    """A scheduler of the driver, whose outputs go over the wire to an output processor."""

    def __init__(self, model, *, is_async=False, blocks=200, log_stats=True, is_traced=False):
        config = engine_config(model, is_async=is_async, blocks=blocks)
        build, stock = build_phase_scheduler, Scheduler
        if is_async:
            build, stock = build_async_phase_scheduler, AsyncScheduler
        self.driver = Driver.build(build(stock), config, is_async=is_async)
        self.processor = upstream.OutputProcessor(
            None, log_stats=log_stats, tracing_enabled=is_traced
        )
        self.seen = {}
        self.stats = []
        self.params = []
        update = self.driver.scheduler.update_from_output

        def update_from_output(*args, **kwargs):
            sent = update(*args, **kwargs)
            for client in sent.values():
                self.take(client)
            return sent

        self.driver.scheduler.update_from_output = update_from_output

    def add(self, job):
        kind = RequestOutputKind.DELTA
        params = SamplingParams(output_kind=kind, detokenize=False, max_tokens=job.max_tokens)
        made = core_request(job.request_id, job.prompt, params, job.request_id)
        queue = upstream.RequestOutputCollector(kind, job.request_id)
        self.processor.add_request(made, None, None, 0, queue)
        self.seen[job.request_id] = queue, []
        self.driver.add(job)

    def take(self, sent):
        frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=sent.outputs))
        arrived = MsgpackDecoder(EngineCoreOutputs).decode(frames)
        stats = IterationStats() if self.processor.log_stats else None
        self.processor.process_outputs(arrived.outputs, self.driver.now_s, stats)
        if stats is not None:
            self.stats.append(times_of(stats))
        for queue, outputs in self.seen.values():
            while (result := queue.get_nowait()) is not None:
                self.params.append(result.kv_transfer_params)
                outputs.append(result.outputs[0])

    def outputs(self, name):
        return self.seen[name][1]


JOBS = {
    "thinks": Job("thinks", THINKS, 12, 7),
    "plain": Job("plain", PLAIN, None, 9),
    "cut": Job("cut", THINKS, 40, 7, max_tokens=20),
    "own": Job("own", PLAIN, None, 30, opening=(THINK_START, *[WORD] * 5, THINK_END, WORD)),
}
