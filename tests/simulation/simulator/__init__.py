"""Drives vLLM's real scheduler in every configuration from one seed, and checks what must hold."""
