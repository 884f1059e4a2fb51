"""Workloads, clients, metrics and reports for served comparisons."""

import logging

# It says which of the fonts it might use are not there, and draws with the one it brings.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
