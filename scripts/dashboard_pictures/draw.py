"""Draws docs/pictures/dashboard-*.png with Grafana's own panel components (see page.tsx).

scripts/dashboard_pictures/run draw FOLDER                 what `record FOLDER` kept
scripts/dashboard_pictures/run draw URL --last-s 900       what a running Prometheus holds
"""

import argparse
import functools
import http.server
import io
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alerting import DASHBOARDS, ROOT, program
from browser import browsing
from PIL import Image
from run_server import free_port

HERE = Path(__file__).parent
BUILT = ROOT / "out" / "dashboard_pictures"
WIDTH = 1280
READY_LIMIT_S = 60
# Of a picture: panels have few colours, and the pages stay small.
COLOURS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a folder of `record`, or the address of a Prometheus")
    parser.add_argument("--last-s", type=int, default=900, help="of a running Prometheus")
    parser.add_argument("--scrape-s", type=int, default=5, help="its interval between scrapes")
    parser.add_argument("--only", help="one dashboard")
    args = parser.parse_args()
    build()
    if args.source.startswith("http"):
        end = int(time.time())
        draw(args.source, end - args.last_s, end, args.scrape_s, args.only)
        return
    folder = Path(args.source).resolve()
    begin, end = map(int, (folder / "range").read_text().split())
    with recorded(folder) as url:
        draw(url, begin, end, args.scrape_s, args.only)


def build() -> None:
    """Bundles page.tsx with the packages of package.json, all of it in an ignored folder."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "page.tsx"):
        shutil.copy(HERE / name, BUILT)
    npm = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(npm, cwd=BUILT, check=True)
    bundle = ["npx", "esbuild", "page.tsx", "--bundle", "--minify", "--outfile=site/page.js"]
    bundle += ['--define:process.env.NODE_ENV="production"', "--log-level=error"]
    bundle += ["--jsx=automatic", "--loader:.ttf=empty"]
    subprocess.run(bundle, cwd=BUILT, check=True)
    site = BUILT / "site"
    shutil.copy(HERE / "page.html", site)
    # Where the components look for their icons and their font.
    packages = BUILT / "node_modules"
    icons = packages / "@grafana" / "ui" / "dist" / "public"
    shutil.copytree(icons, site / "public", dirs_exist_ok=True)
    fonts = site / "public" / "fonts" / "inter"
    fonts.mkdir(parents=True, exist_ok=True)
    for name, weight in (("Regular", 400), ("Medium", 500)):
        font = packages / "@fontsource" / "inter" / "files" / f"inter-latin-{weight}-normal.woff2"
        shutil.copy(font, fonts / f"Inter-{name}.woff2")
    shutil.copytree(DASHBOARDS[0].parent, site / "dashboards", dirs_exist_ok=True)


def draw(prometheus: str, begin: int, end: int, scrape_s: int, only: str | None) -> None:
    with serving(BUILT / "site") as site, browsing() as browser:
        for path in DASHBOARDS:
            if only not in (None, path.stem):
                continue
            asked = {"dashboard": path.stem, "prometheus": prometheus}
            asked |= {"from": begin, "to": end, "scrape": scrape_s}
            url = f"{site}/page.html?{urllib.parse.urlencode(asked)}"
            browser.open(url, width=WIDTH)
            browser.wait_for("document.body.dataset.drawn", READY_LIMIT_S)
            height = browser.evaluate("document.documentElement.scrollHeight")
            browser.open(url, width=WIDTH, height=height)
            browser.wait_for("document.body.dataset.drawn", READY_LIMIT_S)
            # Icons come one by one, and curves are drawn with the next frames.
            time.sleep(2)
            picture = ROOT / "docs" / "pictures" / f"dashboard-{path.stem}.png"
            browser.screenshot(picture)
            drawn = Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")
            drawn.quantize(COLOURS).save(picture, optimize=True)
            kilobytes = picture.stat().st_size // 1000
            print(f"{picture.relative_to(ROOT)}: {drawn.width} x {drawn.height}, {kilobytes} kB")
        for said in browser.said:
            print(f"the page said {said}")


@contextmanager
def recorded(folder: Path) -> Iterator[str]:
    """Address of a Prometheus that has a recording and scrapes nothing."""
    (folder / "nothing.yml").write_text("")
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder}/nothing.yml", "--log.level=error"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + READY_LIMIT_S
        while not is_ready(f"http://{address}/-/ready"):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("scripts/dashboard_pictures: Prometheus does not start")
            time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310, the address is ours
            return True
    except OSError:
        return False


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Address under which the folder's files are until the block ends."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            """Says nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
