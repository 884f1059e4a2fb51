"""Measures, probes and closes thinking, in the EngineCore process."""
