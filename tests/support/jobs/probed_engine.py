"""A patched engine whose thoughts are probed to their ends, and what the trace says of them."""

import json
from collections import defaultdict

from engine_plans import PATIENT
from engine_watch import request_name
from run_engine import PATCHED, Job, run_job

# The tiny reasoner's passes are paragraphs; between them a probe is due by distance. Nothing is
# ever converged, so thoughts are probed to their ends.
DENSE = {
    "EXIT__MODE": "observe",
    "EXIT__OBSERVED_AT_A_TIME": "1000",
    "EXIT__EAT_WARMUP_PROBES": "100000",
    "EXIT__RPDI": "false",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "7",
    "EXIT__PROBE_EVERY_STEPS": "1",
}
SETTINGS = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in DENSE.items()}


class Probed:
    """One job: its stages' runs, its log, and the trace by request name."""

    def __init__(self, stages, folder, **job):
        file = folder / "trace.jsonl"
        env = PATCHED | PATIENT | SETTINGS | {"MERIDIAN_PATCH_SET_EXIT__TRACE": str(file)}
        result = run_job(Job(stages, env=env, allow_async=True, **job), folder)
        self.runs = {name: each["runs"]["run"] for name, each in result["stages"].items()}
        self.log = (folder / "log.txt").read_text(errors="replace")
        self.trace = defaultdict(list)
        for line in file.read_text().splitlines():
            event = json.loads(line)
            self.trace[request_name(event["request"])].append(event)

    def probes(self, request):
        """What was measured along one request, in order."""
        return [event for event in self.trace[request] if event["event"] == "probe"]
