"""Declares, checks, applies and undoes replacements of upstream names; knows nothing of vLLM."""
