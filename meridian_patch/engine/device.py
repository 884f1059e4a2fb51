"""Says what vLLM would run on here."""


def accelerator_name() -> str | None:
    """Name of the first accelerator that vLLM's platform finds; None when it runs on the CPU.

    A server started with the same interpreter and environment finds the same one.
    """
    # Load-bearing: the platform is what the servers choose by; cpu names its devices "cpu".
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        return None
    return str(current_platform.get_device_name())
