"""One trip on the GPU machine: unpack what this folder brings, run parts of the suite, hand over.

    python3 -P FOLDER/trip.py one OUT     # kernels; no vLLM needed
    python3 -P FOLDER/trip.py two OUT     # servers and engines, right behind trip one

Only the standard library and the machine's own packages. What is unpacked stays in a folder of the
home directory. OUT takes the page, its data, the tables and an archive of the logs.
"""

import argparse
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

TRIPS = ("one", "two")
PACKAGES, COMPILED = "packages.tar.xz", "compiled.tar.xz"
CHUNKS = ("compiled.0", "compiled.1")
# From the first line to the last; the suite ends earlier by itself.
LIMITS_S = {"one": 100.0, "two": 570.0}
# Of a trip, parts that run at once, and the seconds of each; None: all of the trip's. What is over
# soon runs while the servers of what is timed compile, which takes 45 to 80 seconds there.
PARTS: dict[str, dict[str, float | None]] = {
    "one": {"kernel-tests": None},
    "two": {"served": None, "sync-check": 150.0, "close-lag": 150.0},
}
# Unpacking before, and handing over behind what the suite is given.
BESIDE_S = {"one": 15.0, "two": 25.0}
REHEARSAL_S = 2400.0
KNOWN = {"torch": "2.11", "triton": "3.6"}
CAPABILITY = (9, 0)
LEAST_GIB = 40
POLL_S = 5.0
MOST_BYTES = 15 * 2**20
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trip", choices=TRIPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, help="of the whole trip (default: 100, 570)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, also without a GPU")
    args = parser.parse_args()
    begin = time.monotonic()
    here, stay = Path(__file__).resolve().parent, Path.home() / "meridian-gpu-kit"
    args.out.mkdir(parents=True, exist_ok=True)
    surprises = list(look_around(rehearse=args.rehearse))
    for line in surprises:
        print(f"gpu_kit: {line}", flush=True)
    try:
        (unpack_one if args.trip == "one" else unpack_two)(here, stay)
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        sys.exit(f"gpu_kit: could not unpack: {error}. Run trip one, then trip two right behind it")
    spent = time.monotonic() - begin
    print(f"gpu_kit: unpacked after {spent:.0f} s", flush=True)
    limit_s = args.limit_s or (REHEARSAL_S if args.rehearse else LIMITS_S[args.trip])
    suite = Suite(args.trip, stay, args.out, rehearse=args.rehearse)
    code = suite.run(limit_s - spent, surprises)
    hand_over(stay / args.trip, args.out)
    sys.exit(code)


def look_around(*, rehearse: bool) -> Iterator[str]:
    """What differs from the machine that this was made for, a line each."""
    for name, wanted in KNOWN.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if not found.startswith(wanted):
            yield f"{name} is {found}, expected {wanted}"
    if sys.version_info[:2] != (3, 12) and not rehearse:
        yield f"Python is {sys.version.split()[0]}, expected 3.12: compiled packages may not load"
    import torch

    if not torch.cuda.is_available():
        yield "torch finds no GPU"
        return
    properties = torch.cuda.get_device_properties(0)
    if (properties.major, properties.minor) != CAPABILITY:
        yield (
            f"{properties.name} has compute capability {properties.major}.{properties.minor}, "
            "expected 9.0 (Hopper): vLLM's attention kernels may not run"
        )
    gib = properties.total_memory / 2**30
    if gib < LEAST_GIB:
        yield f"the GPU has {gib:.0f} GiB, expected at least {LEAST_GIB}: the 8B shape may not fit"


def unpack_one(here: Path, stay: Path) -> None:
    shutil.rmtree(stay, ignore_errors=True)
    stay.mkdir(parents=True)
    shutil.copy(here / CHUNKS[0], stay)
    shutil.copytree(here, stay / "kit", ignore=shutil.ignore_patterns("compiled.*", PACKAGES))
    with zipfile.ZipFile(next(here.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            wheel.extract(name, stay / "product")
    unpack_archive(here / PACKAGES, stay / "site")


def unpack_two(here: Path, stay: Path) -> None:
    chunk = stay / CHUNKS[0]
    if not chunk.is_file():
        raise FileNotFoundError(f"what trip one leaves is not here ({chunk})")
    whole = stay / COMPILED
    whole.write_bytes(chunk.read_bytes() + (here / CHUNKS[1]).read_bytes())
    unpack_archive(whole, stay / "site")


def unpack_archive(path: Path, to: Path) -> None:
    with tarfile.open(path) as archive:
        archive.extractall(to, filter="data")


class Suite:
    """The suite's parts of a trip, each in a process of its own."""

    def __init__(self, trip: str, stay: Path, out: Path, *, rehearse: bool) -> None:
        self.trip, self.stay, self.out, self.rehearse = trip, stay, out, rehearse

    def run(self, limit_s: float, surprises: list[str]) -> int:
        """Run them; end them, and all that they started, at the limit. Pages are copied as it goes.

        In a rehearsal one after the other: it may have few cores.
        """
        end = time.monotonic() + limit_s
        parts = PARTS[self.trip]
        waves = [[name] for name in parts] if self.rehearse else [list(parts)]
        codes = [code for wave in waves for code in self.run_wave(wave, end, surprises)]
        return max(codes)

    def run_wave(self, wave: list[str], end: float, surprises: list[str]) -> list[int]:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for part in wave:
                limit_s = end - time.monotonic()
                process = subprocess.Popen(
                    self.command(part, limit_s, surprises),
                    cwd=self.stay / "kit",
                    env=self.environment(),
                    process_group=0,
                )
                processes.append(process)
            while time.monotonic() < end:
                time.sleep(POLL_S)
                copy_pages(self.stay / self.trip, self.out)
                if all(process.poll() is not None for process in processes):
                    return [process.returncode for process in processes]
            print(f"gpu_kit: {', '.join(wave)} did not end in time", flush=True)
            return [1]
        finally:
            # Servers have groups of their own, which end with the suite's interrupt.
            for number, patience_s in ((signal.SIGINT, 12.0), (signal.SIGKILL, 2.0)):
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, number)
                deadline = time.monotonic() + patience_s
                while time.monotonic() < deadline:
                    if all(process.poll() is not None for process in processes):
                        break
                    time.sleep(0.1)

    def command(self, part: str, limit_s: float, surprises: list[str]) -> list[str]:
        of_part = PARTS[self.trip][part]
        whole_s = limit_s - BESIDE_S[self.trip]
        seconds = whole_s if of_part is None or self.rehearse else min(whole_s, of_part)
        command = [sys.executable, "-P", "scripts/lab/gpu_suite/command.py"]
        command += ["--parts", part, "--minutes", f"{max(0.5, seconds / 60):.2f}"]
        command += ["--out", str(self.stay / self.trip / part), "--shape", "qwen3-8b"]
        command += ["--rehearse"] if self.rehearse else []
        for line in surprises:
            command += ["--surprise", line]
        return command

    def environment(self) -> dict[str, str]:
        # In a rehearsal the machine's own vLLM serves: the packed one is for another Python.
        sites = [self.stay / "product", *([] if self.rehearse else [self.stay / "site"])]
        return dict(os.environ) | {  # noqa: TID251 - the product is not on the path here
            "PYTHONPATH": os.pathsep.join(map(str, sites)),
            # FlashInfer is not packed.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "PYTHONUNBUFFERED": "1",
        }


def copy_pages(folder: Path, out: Path) -> None:
    """Copy each part's page, its data and tables, none of them too large."""
    for path in sorted(folder.glob("*/*")):
        if path.suffix in {".html", ".json", ".csv", ".yaml"} and path.stat().st_size < MOST_BYTES:
            to = out / path.relative_to(folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)


def hand_over(folder: Path, out: Path) -> None:
    """Copy the pages and their data, and an archive of logs and timed steps."""
    if not folder.is_dir():
        print("gpu_kit: the suite wrote nothing", flush=True)
        return
    copy_pages(folder, out)
    logs = out / "logs.tar.xz"
    with tarfile.open(logs, "w:xz") as archive:
        for path in sorted(folder.rglob("*")):
            is_raw = path.suffix in {".log", ".txt", ".jsonl"} or path.name == "result.json"
            is_data = path.is_file() and path.parent.name == "served"
            if (is_raw or is_data) and path.stat().st_size < 20 * MIB:
                archive.add(path, path.relative_to(folder))
    if logs.stat().st_size > MOST_BYTES:
        logs.unlink()
        print("gpu_kit: the logs are too large to hand over", flush=True)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    print(f"gpu_kit: {', '.join(names)}", flush=True)


if __name__ == "__main__":
    main()
