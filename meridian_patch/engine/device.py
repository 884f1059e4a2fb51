"""Names the accelerator that vLLM would use on this machine."""


def accelerator_name() -> str | None:
    """Name of the first accelerator that vLLM's platform finds; None if it runs on the CPU.

    A server started with the same interpreter and environment finds the same one.
    """
    # Load-bearing: servers choose their device by this platform; the CPU's device type is "cpu".
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        return None
    return str(current_platform.get_device_name())
