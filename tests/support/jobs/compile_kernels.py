"""Compiles the kernels for a GPU that need not be there; prints one JSON line per variant.

Runs in a process of its own, without Triton's interpreter. Of each variant it says what ptxas gave
it and, from the machine code, how many instructions the loop over a row takes per element.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from meridian_patch.kernels import eat_update, row_signals
from meridian_patch.kernels._launch import MAX_PARTS, config_for

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
LOGITS = {"float32": "*fp32", "bfloat16": "*bf16"}
READERS = (
    row_signals._row_signals_kernel,
    row_signals._part_sums_kernel,
    eat_update._eat_update_kernel,
)
# One of each way that rows are read, and a served vocabulary that is no multiple of 16.
WIDTHS = (1024, 151936, 151669)
# Pointers and strides of a served vocabulary are multiples of 16.
ALIGNED = ("state_ptr", "logits_ptr", "logits_row_stride", "n_cols")
FLOATS = ("alpha", "log_keep", "warm_up", "max_entropy")
WARP = 32
# An instruction of the listing, with its address.
INSTRUCTION = re.compile(r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>\S.*?);")
BRANCH = re.compile(r"BRA\b.*?(?P<target>0x[0-9a-f]+)")


def argument_type(name: str, logits: str) -> str:
    if name == "logits_ptr":
        return LOGITS[logits]
    if name in {"rows_ptr", "slots_ptr"}:
        return "*i64"
    if name in {"out_ptr", "state_ptr", "sums_ptr"}:
        return "*fp32"
    if name in {"BLOCK_SIZE", "MAX_PARTS"}:
        return "constexpr"
    return "fp32" if name in FLOATS else "i32"


def compile_kernel(kernel, logits: str, n_cols: int, capability: int) -> dict:
    config = config_for(n_cols)
    names = kernel.arg_names
    aligned = [name for name in ALIGNED if name in names and (name != "n_cols" or not n_cols % 16)]
    reads = "BLOCK_SIZE" in names
    source = ASTSource(
        kernel,
        {name: argument_type(name, logits) for name in names},
        {"BLOCK_SIZE": config.block_size} if reads else {"MAX_PARTS": MAX_PARTS},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, WARP)
    warps = config.num_warps if reads else 1
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    usage = listing(compiled, "-res-usage")
    loop = longest_loop(listing(compiled, "-sass")) if reads else []
    per_thread = config.block_size / (warps * WARP)
    return {
        "kernel": kernel.fn.__name__,
        "logits": logits,
        "n_cols": n_cols,
        "capability": capability,
        "usage": usage.split(),
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "threads": warps * WARP,
        "instructions_per_element": len(loop) / per_thread,
        "exponentials_per_element": sum("MUFU" in text for text in loop) / per_thread,
        "wide_loads": sum("LDG.E" in text and ".128" in text for text in loop),
        "loads": sum("LDG" in text for text in loop),
        "barriers": sum("BAR" in text or "SHFL" in text for text in loop),
    }


def listing(compiled, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [CUOBJDUMP, option, cubin.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def longest_loop(sass: str) -> list[str]:
    """Instructions of the longest stretch that a branch at its end repeats."""
    found = [match for match in map(INSTRUCTION.match, sass.splitlines()) if match]
    texts = [match["text"] for match in found]
    places = {int(match["address"], 16): place for place, match in enumerate(found)}
    loops = [[]]
    for place, text in enumerate(texts):
        branch = BRANCH.search(text)
        target = places.get(int(branch["target"], 16), place) if branch else place
        if target < place:
            loops.append(texts[target : place + 1])
    return max(loops, key=len)


def main() -> None:
    capabilities = map(int, sys.argv[1:])
    for capability in capabilities:
        for logits in LOGITS:
            for kernel in READERS:
                for n_cols in WIDTHS:
                    print(json.dumps(compile_kernel(kernel, logits, n_cols, capability)))
            merge = row_signals._merge_parts_kernel
            print(json.dumps(compile_kernel(merge, logits, WIDTHS[-1], capability)))


if __name__ == "__main__":
    main()
