"""What is replaced in vLLM, by the process in which the replacement acts. Data only."""

from typing import Final

from meridian_patch.patches import api_server, engine_core, worker

PATCHES: Final = (*engine_core.PATCHES, *worker.PATCHES, *api_server.PATCHES)
REBINDINGS: Final = (*engine_core.REBINDINGS, *worker.REBINDINGS, *api_server.REBINDINGS)
