"""A pytest plugin: vLLM cannot be imported, as on a machine that has none.

``scripts/test --pure`` runs the tests of pure decisions with it.
"""

import sys

sys.modules["vllm"] = None
