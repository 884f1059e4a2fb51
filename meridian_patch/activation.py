"""Whether meridian_patch is active in this process, and how importing it makes it so.

Three ways lead here: ``VLLM_PLUGINS`` names the plugin; the launching process ran
``import meridian_patch`` before vLLM loaded its plugins; ``meridian serve`` set
``MERIDIAN_PATCH=1``. ``MERIDIAN_PATCH=0`` wins over all of them.
"""

import sys
from importlib.metadata import entry_points

from meridian_patch import envs
from meridian_patch.errors import ConfigError, PatchRefused

ENTRY_POINT_GROUP = "vllm.general_plugins"


def is_active() -> bool:
    """True when this process should run patched."""
    env = envs.environment()
    asked = envs.activation(env)
    if asked is not None:
        return asked
    return envs.PLUGIN_NAME in (envs.plugin_names(env) or [])


def activate_on_import() -> None:
    """Activate this process and its children when the user imported the package.

    vLLM imports the package too, to load its entry point, and that alone must change nothing. A
    wrong value of ``MERIDIAN_PATCH`` is refused where vLLM loads the plug-in, not here.

    Raises:
        PatchRefused: vLLM would not find the plug-in, and the user would be served stock.
    """
    if _is_vllm_loading_plugins():
        return
    try:
        asked = envs.activation(envs.environment())
    except ConfigError:
        # Commands that find such errors import the package too. vLLM's processes refuse to start.
        check_entry_point()
        envs.load_in_children()
        return
    if asked is not False:
        check_entry_point()
        envs.activate_children()


def check_entry_point() -> None:
    """Raise PatchRefused when vLLM has no way to find the plugin."""
    names = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if envs.PLUGIN_NAME not in names:
        raise PatchRefused(
            "meridian_patch is importable but not installed, so vLLM's processes would not load "
            "it and would run stock. Install it with 'pip install .' (or set MERIDIAN_PATCH=0)"
        )


def _is_vllm_loading_plugins() -> bool:
    # Load-bearing: vLLM sets this flag before it loads the first entry point.
    plugins = sys.modules.get("vllm.plugins")
    return bool(getattr(plugins, "plugins_loaded", False))
