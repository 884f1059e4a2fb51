"""Phase-aware scheduling of reasoning models for stock vLLM.

Importing this package before vLLM makes the engines of this process, and of the processes it
starts, phase-aware. See the README for the other two ways and for the off switch.
"""

from meridian_patch.activation import activate_on_import

__version__ = "0.1.0"
__all__ = ["__version__"]

activate_on_import()
