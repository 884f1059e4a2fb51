"""Packs the product and vLLM's CUDA build into two folders that travel one after the other.

Folder one holds the product, the GPU suite, the kernels' tests and bench, what vLLM imports, and
the beginning of the archive of vLLM's compiled parts; folder two holds the rest of that archive.
Both have the same size, so that each fits beside a checkout into what one trip may carry.
"""

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from imports import Findings, walk
from trip import CHUNKS, COMPILED, PACKAGES, TRIPS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MIB = 2**20
MOST_MIB = 60
# What one trip carries, the checkout's own files included.
MOST_CARRIED_MIB = 64
MOST_CHARACTERS = 2000
VLLM = "vllm==0.32.0"
PYTHON = "3.12"
GLIBC = (28, 39, 35, 34, 31, 27, 24, 17)
# Kernels of models and GPUs that the kit does not run: FlashAttention 2, mixture of experts, MLA.
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_moe_C*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/_flashkda_C*",
    "vllm/_deepselect_C*",
    "vllm/_flashmla*_C*",
    "vllm/_qutlass_C*",
    "vllm/vllm-rs",
    "vllm/entrypoints/serve/instrumentator/static/*",
)
ROOTS = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm._C_stable_libtorch",
    "vllm.model_executor.models.qwen3",
    "vllm.reasoning.deepseek_r1_reasoning_parser",
    "meridian_patch.plugin",
    "meridian_patch.patches",
    "meridian_patch.engine.scheduler_cls",
    "meridian_patch.engine.worker.logits_tap",
    "gpu_suite.command",
    "meridian_patch.replay.timed_engine",
)
SUITE = "scripts/lab/gpu_suite"
CHECKOUT = (
    "tests/kernels",
    "tests/support/references/kernel_*.py",
    "scripts/bench_kernels.py",
    SUITE,
)
PYTEST_INI = "[pytest]\npythonpath = tests/support/references\naddopts = --import-mode=importlib\n"


def prepare(out: Path) -> None:
    """Make both folders and print what they hold and the two commands.

    Ends the program with one sentence when a package, an import or a size is wrong.
    """
    wheels = out / "wheels"
    with tempfile.TemporaryDirectory() as text:
        site, product = Path(text) / "site", Path(text) / "product"
        say("downloading vLLM and what it imports")
        download(wheels)
        say("unpacking")
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        say("building the product's wheel")
        built = build_wheel(Path(text))
        unpack(built, product)
        say("following the imports")
        found = check_imports(site, product)
        for trip in TRIPS:
            shutil.rmtree(out / trip, ignore_errors=True)
            (out / trip).mkdir(parents=True)
        say("packing, which takes minutes")
        pack(site, built, out)
    report(out, found)


def say(words: str) -> None:
    print(f"gpu_kit: {words}", flush=True)


def download(wheels: Path) -> None:
    wheels.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{number}_x86_64" for number in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    command = [sys.executable, "-P", "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for abi in ("cp312", "abi3", "none"):
        command += ["--abi", abi]
    for platform in platforms:
        command += ["--platform", platform]
    command += ["-d", str(wheels), "-r", str(HERE / "requirements.txt"), VLLM]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"gpu_kit: pip could not download the packages: {last_line(run.stderr)}")


def unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            if not any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                file.extract(name, site)


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation"]
    run = subprocess.run(
        [*command, "--outdir", str(folder), str(ROOT)], check=False, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(f"gpu_kit: the wheel could not be built: {last_line(run.stdout + run.stderr)}")
    return next(folder.glob("meridian_patch-*.whl"))


def check_imports(site: Path, product: Path) -> Findings:
    image = frozenset(re.findall(r"^[A-Za-z]\w*", (HERE / "image.txt").read_text(), re.MULTILINE))
    found = walk(ROOTS, (site, product, (ROOT / SUITE).parent), image)
    if found.missing:
        lines = [f"  {name}, which {by} imports" for name, by in sorted(found.missing.items())]
        sys.exit(
            "gpu_kit: these imports are neither in the pack nor in image.txt; add them to "
            "requirements.txt or image.txt:\n" + "\n".join(lines)
        )
    return found


def pack(site: Path, wheel: Path, out: Path) -> None:
    one, two = (out / trip for trip in TRIPS)
    files = sorted(path for path in site.rglob("*") if path.is_file())
    compiled = [p for p in files if p.suffix == ".so" and p.parent == site / "vllm"]
    write_archive(one / PACKAGES, site, [path for path in files if path not in compiled])
    for pattern in CHECKOUT:
        for path in ROOT.glob(pattern):
            copy(path, one / path.relative_to(ROOT))
    (one / "pytest.ini").write_text(PYTEST_INI)
    (one / "COMMIT").write_text(commit())
    shutil.copy(wheel, one)
    for folder in (one, two):
        shutil.copy(HERE / "trip.py", folder)
    whole = two / COMPILED
    write_archive(whole, site, compiled)
    data = whole.read_bytes()
    whole.unlink()
    first = max(1, (len(data) - size_of(one)) // 2)
    (one / CHUNKS[0]).write_bytes(data[:first])
    (two / CHUNKS[1]).write_bytes(data[first:])


def write_archive(path: Path, site: Path, files: Iterable[Path]) -> None:
    with lzma.open(path, "wb", preset=6) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for file in files:
            tar.add(file, file.relative_to(site))


def report(out: Path, found: Findings) -> None:
    print(f"imports: {len(found.seen)} modules of the pack, none is missing")
    print(f"  the machine must have: {', '.join(sorted(found.image))}")
    print(f"  under a condition, and not there: {', '.join(sorted(found.conditional)) or 'none'}")
    tree = tracked_bytes()
    for trip in TRIPS:
        size = size_of(out / trip)
        carried = (size + tree) / MIB
        print(f"{out / trip}: {size / MIB:.1f} MiB, {carried:.1f} MiB with the checkout's files")
        if size > MOST_MIB * MIB or carried > MOST_CARRIED_MIB:
            sys.exit(
                f"gpu_kit: the folder may have {MOST_MIB} MiB, and {MOST_CARRIED_MIB} MiB with the "
                "files of the checkout; leave more out (LEFT_OUT in prepare.py)"
            )
    print("the two commands, from the checkout's root; call two right behind one, without a look:")
    for trip in TRIPS:
        print(f"  {command_of(trip, relative(out))}    (carry {relative(out) / trip})")
    print("  --limit-s N, where less than 100 and 570 s are left")


def command_of(trip: str, folder: Path) -> str:
    """The command of a trip; ``$OUT`` is the folder that takes its results."""
    command = f'python3 -P {folder / trip}/trip.py {trip} "$OUT"'
    assert len(command) < MOST_CHARACTERS
    return command


def relative(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def copy(path: Path, to: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tracked_bytes() -> int:
    names = git("ls-files", "-z").split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file())


def commit() -> str:
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "-s") else "")


def git(*arguments: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=False, capture_output=True, text=True
    )
    return run.stdout.strip()


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu_kit prepare", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="folder (default: .gpu)")
    prepare(parser.parse_args().out.resolve())


if __name__ == "__main__":
    main()
