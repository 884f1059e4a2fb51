"""A real Prometheus that scrapes servers of a test, with our rules at sixty times their speed."""

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import yaml
from alerting import ALERTS, RULES, program
from run_engine import log_tail
from run_server import free_port

SCRAPE_S = 0.5
START_LIMIT_S = 30
# A minute of the rules, in seconds of a test.
_MINUTE = re.compile(r"\b(\d+)m\b")


def at_speed(rules: Path, limits: Mapping[str, tuple[str, str]]) -> str:
    """The text of a file of rules with seconds for minutes.

    Args:
        rules: the file.
        limits: alert to a limit in its expression, and what stands for it in a test.
    """
    file = yaml.safe_load(rules.read_text())
    for group in file["groups"]:
        for rule in group["rules"]:
            limit = limits.get(rule.get("alert", ""))
            if limit is not None:
                assert rule["expr"].count(limit[0]) == 1
                rule["expr"] = rule["expr"].replace(*limit)
            for name in {"expr", "for"} & rule.keys():
                rule[name] = _MINUTE.sub(r"\1s", rule[name])
    return yaml.safe_dump(file)


class Prometheus:
    """Starts on entry and is ready then; ends on exit.

    Args:
        address: host and port of the server it scrapes; ``scrape`` changes it.
        folder: takes its files.
        limits: see ``at_speed``.
    """

    def __init__(
        self, address: str, folder: Path, limits: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self._program = program("prometheus")
        self._url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._process: subprocess.Popen | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for path in (RULES, ALERTS):
            (folder / path.name).write_text(at_speed(path, limits or {}))
        self._targets = folder / "targets.json"
        self.scrape(address)
        job = {
            "job_name": "vllm",
            "file_sd_configs": [{"files": [self._targets.name], "refresh_interval": "1s"}],
        }
        every = f"{round(SCRAPE_S * 1000)}ms"
        config = {
            "global": {
                "scrape_interval": every,
                "scrape_timeout": every,
                "evaluation_interval": every,
            },
            "rule_files": [RULES.name, ALERTS.name],
            "scrape_configs": [job],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def scrape(self, *addresses: str) -> None:
        """Scrape these servers from now on; a single one is the same as before, started again."""
        told = [{"targets": list(addresses)}]
        if len(addresses) == 1:
            told[0]["labels"] = {"instance": "the server"}
        # Prometheus watches the folder, and must not read half of the file.
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.rename(self._targets)

    def __enter__(self) -> Self:
        log = self._folder / "prometheus.log"
        address = self._url.removeprefix("http://")
        command = [self._program, "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        command += [f"--web.listen-address={address}", "--log.level=warn"]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=self._folder)
        try:
            self._wait_until_ready(log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that an expression has now."""
        query = urllib.parse.urlencode({"query": expression})
        result = self._get(f"/api/v1/query?{query}")["data"]
        found = result["result"]
        if result["resultType"] == "scalar":
            return [({}, float(found[1]))]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def alerts(self) -> dict[str, list[dict]]:
        """Alerts that fire now, by name."""
        found: dict[str, list[dict]] = {}
        for alert in self._get("/api/v1/alerts")["data"]["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    def wait(self, is_so: Callable[[Self], bool], limit_s: float) -> bool:
        """Whether it becomes so within the limit."""
        deadline = time.monotonic() + limit_s
        while not is_so(self):
            if time.monotonic() > deadline:
                return False
            time.sleep(SCRAPE_S / 2)
        return True

    def _get(self, path: str) -> dict:
        try:
            with urllib.request.urlopen(f"{self._url}{path}", timeout=30) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from None

    def _wait_until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                    return
            except OSError:
                ended = self._process.poll() is not None
                assert not ended, f"prometheus ended:\n{log_tail(log)}"
                assert time.monotonic() < deadline, f"prometheus not ready:\n{log_tail(log)}"
                time.sleep(0.1)
