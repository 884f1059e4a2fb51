"""examples/observability: its files are whole and fit together. Nothing is started."""

import json
import shutil

import yaml
from alerting import DASHBOARDS, PROMETHEUS, ROOT, promtool

EXAMPLE = ROOT / "examples" / "observability"
COMPOSE = yaml.safe_load((EXAMPLE / "compose.yml").read_text())["services"]


def mounts(service):
    """Path in the container to path here."""
    found = {}
    for volume in COMPOSE[service]["volumes"]:
        here, there, mode = volume.split(":")
        assert mode == "ro"
        found[there] = (EXAMPLE / here).resolve()
    return found


def test_both_programs_are_started_with_files_that_exist():
    assert set(COMPOSE) == {"prometheus", "grafana"}
    for service in COMPOSE:
        assert all(path.exists() for path in mounts(service).values())
        # Neither `latest` nor open to others.
        assert COMPOSE[service]["image"].rpartition(":")[2][:1] in "v123456789"
        assert all(port.startswith("127.0.0.1:") for port in COMPOSE[service]["ports"])


def test_prometheus_takes_its_configuration(tmp_path):
    """With the files where the container has them, by promtool."""
    told = mounts("prometheus")
    for there, here in told.items():
        place = tmp_path / there.removeprefix("/etc/prometheus/")
        (shutil.copytree if here.is_dir() else shutil.copy)(here, place)
    (config,) = [each for each in COMPOSE["prometheus"]["command"] if "config.file" in each]
    assert config.partition("=")[2] in told
    said = promtool("check", "config", tmp_path / "prometheus.yml")
    assert "SUCCESS: 2 rule files found" in said
    scraped = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = scraped[0]["static_configs"][0]["targets"]
    assert f"{target.partition(':')[0]}:host-gateway" in COMPOSE["prometheus"]["extra_hosts"]


def test_grafana_finds_the_source_and_the_dashboards():
    told = mounts("grafana")
    places = {
        there: yaml.safe_load(here.read_text()) for there, here in told.items() if here.is_file()
    }
    (source,) = places["/etc/grafana/provisioning/datasources/meridian.yml"]["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    (provider,) = places["/etc/grafana/provisioning/dashboards/meridian.yml"]["providers"]
    folder = told[provider["options"]["path"]]
    assert sorted(folder.glob("*.json")) == DASHBOARDS
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads((folder / home.rpartition("/")[2]).read_text())["uid"] == "meridian-overview"


def test_rules_are_those_of_the_repository():
    assert mounts("prometheus")["/etc/prometheus/meridian"] == PROMETHEUS
