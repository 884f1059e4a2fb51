"""Compiles the kernels for a GPU that need not be there; prints one JSON line per variant.

Runs in a process of its own, without Triton's interpreter.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from meridian_patch.kernels import eat_update, row_signals
from meridian_patch.kernels._launch import config_for

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
LOGITS = {"float32": "*fp32", "bfloat16": "*bf16"}
# One of each way that rows are read.
WIDTHS = (1024, 8192, 151936)
# Pointers and strides of a served vocabulary are multiples of 16.
ALIGNED = ("state_ptr", "logits_ptr", "logits_row_stride", "n_cols")
FLOATS = ("alpha", "log_keep", "warm_up", "max_entropy")


def argument_type(name: str, logits: str) -> str:
    if name == "logits_ptr":
        return LOGITS[logits]
    if name in {"rows_ptr", "slots_ptr"}:
        return "*i64"
    if name in {"out_ptr", "state_ptr"}:
        return "*fp32"
    if name == "BLOCK_SIZE":
        return "constexpr"
    return "fp32" if name in FLOATS else "i32"


def compile_kernel(kernel, logits: str, n_cols: int, capability: int) -> dict:
    config = config_for(n_cols)
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: argument_type(name, logits) for name in names},
        {"BLOCK_SIZE": config.block_size},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED if name in names},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": config.num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], check=True, capture_output=True, text=True
        ).stdout
    return {
        "kernel": kernel.fn.__name__,
        "logits": logits,
        "n_cols": n_cols,
        "capability": capability,
        "usage": usage.split(),
        "wide_loads": compiled.asm["ptx"].count("ld.global.v4.b32"),
    }


def main() -> None:
    capabilities = map(int, sys.argv[1:])
    for capability in capabilities:
        for kernel in (row_signals._row_signals_kernel, eat_update._eat_update_kernel):
            for logits in LOGITS:
                for n_cols in WIDTHS:
                    print(json.dumps(compile_kernel(kernel, logits, n_cols, capability)))


if __name__ == "__main__":
    main()
