"""The ``vllm.general_plugins`` entry point.

vLLM loads it in every process it starts. vLLM swallows what is raised while this module is
imported, so importing it must not be able to fail; what is raised while ``register`` is called
stops the process, so everything that may refuse happens there.
"""


def register() -> None:
    """Apply all patches when meridian_patch is active in this process.

    Raises:
        PatchRefused: the installed vLLM is not one we know (strict mode).
        ConfigError: a configured value is wrong.
    """
    from meridian_patch.activation import is_active

    if is_active():
        from meridian_patch.apply import apply_patches

        apply_patches()
