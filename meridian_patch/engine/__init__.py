"""The only code that imports vLLM."""
