"""Published ways to schedule, on vLLM's real scheduler, as opponents of the policy in replays."""
