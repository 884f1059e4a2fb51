"""The policy lab: workloads, replays and sweeps of them, and their report."""
