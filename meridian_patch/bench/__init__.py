"""Comparisons with stock vLLM: served, simulated, of early exit, and of single operations."""

import logging

# At a lower level it lists the fonts that are not installed.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
