"""The suite of ``scripts/gpu_suite``: what only a machine with a GPU can show, in one report."""
