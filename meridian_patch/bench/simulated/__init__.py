"""Replays on vLLM's scheduler: workloads, comparisons of policies, cost models, validation."""
