"""Watches the schedulers of engine cores that run in processes of their own.

Imported by the main module of a job, and so by every process that is spawned from it.
"""

import os
from dataclasses import asdict

from engine_watch import SchedulerWatch, left_behind, totals

THINK_START_ID, THINK_END_ID = 256, 257


def watch_cores() -> None:
    """Give every engine core a watch, and a utility call ``job_report`` that tells what it saw."""
    from vllm.v1.engine.core import EngineCore

    build, dummy = EngineCore.__init__, EngineCore.execute_dummy_batch

    def build_and_watch(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self._job_watch = SchedulerWatch(self.scheduler, THINK_START_ID, THINK_END_ID)
        self._job_ranks = {"idle_steps": 0, "steps": 0, "worst_queue": 0, "heard_steps": 0}
        self._job_ranks["cut_steps"] = 0
        watch_advice(self.scheduler, self._job_ranks)
        schedule = self.scheduler.schedule

        def schedule_and_count(*args):
            cut = totals(self.scheduler).get("limited_step:tokens", 0)
            output = schedule(*args)
            ranks, waiting = self._job_ranks, self.scheduler.get_request_counts()[1]
            if is_for_others(self.scheduler):
                ranks["cut_steps"] += totals(self.scheduler).get("limited_step:tokens", 0) - cut
            ranks["steps"] += 1
            ranks["worst_queue"] = max(ranks["worst_queue"], waiting)
            return output

        self.scheduler.schedule = schedule_and_count

    def count_dummy(self):
        self._job_ranks["idle_steps"] += 1
        return dummy(self)

    def job_report(self):
        watch = self._job_watch
        return (
            asdict(watch.seen)
            | left_behind(self.scheduler)
            | {
                "pid": os.getpid(),
                "core": type(self).__name__,
                "scheduler": [cls.__name__ for cls in type(self.scheduler).__mro__],
                "counted": totals(self.scheduler),
                "counts": list(self.scheduler.get_request_counts()),
                "ranks": take_ranks(self),
            }
        )

    def take_ranks(self):
        taken = dict(self._job_ranks)
        self._job_ranks.update(dict.fromkeys(taken, 0))
        return taken

    EngineCore.__init__ = build_and_watch
    EngineCore.execute_dummy_batch = count_dummy
    EngineCore.job_report = job_report


def is_for_others(scheduler) -> bool:
    """Whether a cut of the step that was just scheduled is for answers of other ranks alone."""
    policy = getattr(scheduler, "policy_parts", None)
    if policy is None or not policy.queue._is_answered_elsewhere:
        return False
    [balance] = [each for each in scheduler._parts._parts if getattr(each, "exchange", None)]
    return not balance.answering()


def watch_advice(scheduler, ranks: dict[str, int]) -> None:
    """Count the steps before which a rank heard that requests answer on another one."""
    for part in getattr(getattr(scheduler, "_parts", None), "_parts", ()):
        exchange = getattr(part, "exchange", None)
        if exchange is None:
            continue

        def hear_and_count(hear=exchange.hear):
            heard = hear()
            ranks["heard_steps"] += heard > 0
            return heard

        exchange.hear = hear_and_count
