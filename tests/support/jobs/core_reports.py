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

    build = EngineCore.__init__

    def build_and_watch(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self._job_watch = SchedulerWatch(self.scheduler, THINK_START_ID, THINK_END_ID)

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
            }
        )

    EngineCore.__init__ = build_and_watch
    EngineCore.job_report = job_report
