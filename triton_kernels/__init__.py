"""Triton kernels of meridian_patch; import them as ``meridian_patch.kernels``."""

if __name__ == "triton_kernels":  # the repository root leaked onto sys.path
    raise ImportError(
        "this folder is installed as meridian_patch.kernels; the name 'triton_kernels' belongs to "
        "the MoE kernels that vLLM imports. Take the repository root off sys.path"
    )
