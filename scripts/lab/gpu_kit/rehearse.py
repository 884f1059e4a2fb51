"""Runs both trips on this machine, from the prepared folders alone.

The scratch environment has this machine's vLLM and none of the checkout: the folders are copied
out of it, HOME is a scratch folder, and the product that runs is the packed wheel.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

from prepare import ROOT, command_of
from trip import TRIPS

WHERE = "import meridian_patch; print(meridian_patch.__file__)"


def rehearse(kit: Path, out: Path) -> int:
    """Play both commands; returns an exit code."""
    missing = [trip for trip in TRIPS if not (kit / trip / "trip.py").is_file()]
    if missing:
        sys.exit(f"gpu_kit: {kit / missing[0]} is not there; run scripts/gpu_kit prepare")
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        for trip in TRIPS:
            shutil.copytree(kit / trip, scratch / "kit" / trip)
        python = scratch_environment(scratch / "env")
        env = dict(os.environ)  # noqa: TID251 - the product must not be on the path here
        env.pop("PYTHONPATH", None)
        env |= {"HOME": str(scratch), "PATH": f"{python.parent}{os.pathsep}{env['PATH']}"}
        # A slow decision would run as stock on a busy machine.
        env["MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US"] = "100000"
        codes = []
        for trip in TRIPS:
            begin = time.monotonic()
            env["OUT"] = str(out / trip)
            command = f"{command_of(trip, Path('kit'))} --rehearse"
            print(f"$ {command}", flush=True)
            run = subprocess.run(["bash", "-c", command], cwd=scratch, env=env, check=False)
            codes.append(run.returncode)
            spent = time.monotonic() - begin
            print(f"gpu_kit: trip {trip} ended with {run.returncode} after {spent:.0f} s")
        origin = where_from(python, scratch, env)
    print(f"gpu_kit: the product that ran: {origin}")
    for trip in TRIPS:
        print_verdicts(out / trip)
    return max(codes)


def scratch_environment(folder: Path) -> Path:
    """An environment with this one's packages, but not the checkout's editable install."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # A line of a .pth file is a path; the .pth files in that path, an editable install's, are not
    # read again.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python3"


def where_from(python: Path, scratch: Path, env: dict[str, str]) -> str:
    """The file of the product that the trips ran, within the scratch folder."""
    product = scratch / "meridian-gpu-kit" / "product"
    run = subprocess.run(
        [str(python), "-P", "-c", WHERE],
        env=env | {"PYTHONPATH": str(product), "MERIDIAN_PATCH": "0"},
        cwd=scratch,
        capture_output=True,
        text=True,
        check=True,
    )
    return str(Path(run.stdout.strip()).relative_to(scratch))


def print_verdicts(folder: Path) -> None:
    paths = sorted(folder.rglob("report.json"))
    if not paths:
        print(f"gpu_kit: no report.json in {folder}")
    for path in paths:
        for part in json.loads(path.read_text())["parts"]:
            words = f"{part['verdict']} in {part['seconds']:.0f} s: {part['reason']}"
            print(f"  {part['name']}: {words}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu_kit rehearse", description=__doc__)
    parser.add_argument("--kit", type=Path, default=ROOT / ".gpu", help="folder (default: .gpu)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu-kit", help="of the pages")
    args = parser.parse_args()
    sys.exit(rehearse(args.kit.resolve(), args.out.resolve()))


if __name__ == "__main__":
    main()
