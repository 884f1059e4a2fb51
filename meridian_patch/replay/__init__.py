"""vLLM's real scheduler on a virtual clock, and real engines timed step by step."""
