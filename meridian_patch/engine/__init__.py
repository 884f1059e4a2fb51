"""Carries out in vLLM's processes what the pure packages decide."""
