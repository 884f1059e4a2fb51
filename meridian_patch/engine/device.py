"""Names the accelerator that vLLM would use on this machine."""


def accelerator_name() -> str | None:
    """Name of the first accelerator that vLLM's platform finds; None if there is none.

    A server started with the same interpreter and environment finds the same one.
    """
    # Load-bearing: servers choose their device by this platform. The CPU's device type is "cpu"; a
    # CUDA build that sees no GPU has a platform without one, which raises if asked for its name.
    from vllm.platforms import current_platform

    if current_platform.device_type in {"cpu", ""}:
        return None
    return str(current_platform.get_device_name())
