"""Judges a running server by what it tells: reachable, release, metrics, counters, processes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from meridian_patch.engine import front_end
from meridian_patch.operate.doctor.behaviour import check_behaviour
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.operate.http_client import ServerClient, ServerError, read_object
from meridian_patch.operate.scrape import RUNNING, Scrape, ScrapeError, parse
from meridian_patch.patches.lock import LOCKED_VERSIONS
from meridian_patch.telemetry.metrics import METRICS

AREA = Area("server")
_PATCHED = "start it with VLLM_PLUGINS=meridian_patch vllm serve ..., or meridian serve ..."
# Load-bearing: only the Rust front end's reply at /version has it.
RUST_VERSION = "rust_frontend_version"
# Share of steps above which slow decisions are worth a look.
_MANY_SLOW = 0.01

Reports = Sequence[Mapping[str, Any]]


def check_server(client: ServerClient, reports: Reports) -> Iterator[Finding]:
    """What a server tells about itself, then how it behaves.

    Args:
        client: for the server's address.
        reports: of this user's patched processes on this machine.
    """
    try:
        health = client.get("/health")
    except ServerError as error:
        yield AREA.fail(
            "reachable",
            str(error),
            expected="a server that answers",
            fix="start it, or correct host and port; it listens only after the model is loaded",
        )
        return
    if not health.is_ok:
        yield AREA.fail(
            "reachable",
            f"{client.url}/health replies {health.begin}",
            expected="HTTP 200",
            fix="look at the server's log: its engine has ended, or another program listens there",
        )
        return
    yield AREA.ok("reachable", client.url)
    version = _version(client)
    yield check_release(version)
    if RUST_VERSION in version:
        yield check_front_end(version)
        yield from _check_engines(client.is_local, reports)
        return
    scrape = _scrape(client)
    if isinstance(scrape, Finding):
        yield scrape
        return
    yield check_metrics(scrape)
    if not any(name.startswith("meridian_") for name in scrape.samples):
        return
    yield from check_counters(scrape)
    yield check_processes(client.is_local, reports)
    yield from check_behaviour(client, scrape)


def _version(client: ServerClient) -> dict[str, Any]:
    try:
        return read_object(client.get("/version").text)
    except ServerError:
        return {}


def check_front_end(version: Mapping[str, Any]) -> Finding:
    """The server's front end is vLLM's in Rust, in which nothing can be patched."""
    return AREA.warn(
        "front end",
        f"vLLM's in Rust, {version[RUST_VERSION]}: {front_end.MISSING}",
        expected="vLLM's front end in Python, for those",
        fix=f"start the server without {front_end.VARIABLE}, or do without them: "
        "docs/rust-front-end.md",
    )


def _check_engines(is_local: bool, reports: Reports) -> Iterator[Finding]:
    """What the engines behind the Rust front end export, each at a port of its own."""
    if not is_local:
        yield AREA.skip("metrics", "the engines export them: run this on the server's machine")
        return
    yield check_processes(is_local, reports)
    cores = [report for report in reports if report.get("role") == "engine_core"]
    for off in [report["metrics_off"] for report in cores if report.get("metrics_off")]:
        yield AREA.warn(
            "metrics",
            f"an engine exports none: {off}",
            expected="metrics at a port of each engine",
            fix="mend what the message names, and restart the server",
        )
    for url in [str(report["metrics"]) for report in cores if report.get("metrics")]:
        scrape = _scrape(ServerClient(url))
        if isinstance(scrape, Finding):
            yield scrape
            continue
        yield check_metrics(scrape)
        yield from check_counters(scrape)


def check_release(version: Mapping[str, Any]) -> Finding:
    """The server runs a release that the patches were checked against.

    Args:
        version: its reply at ``/version``.
    """
    check, expected = "release", f"one of {', '.join(LOCKED_VERSIONS)}"
    told = str(version.get("version", ""))
    try:
        release = Version(told).public
    except InvalidVersion:
        return AREA.skip(check, "the server does not say which vLLM it runs")
    if release in LOCKED_VERSIONS:
        return AREA.ok(check, f"vLLM {told}")
    return AREA.fail(
        check,
        f"vLLM {told}",
        expected=expected,
        fix=f"pip install 'vllm=={LOCKED_VERSIONS[-1]}' where the server runs",
    )


def _scrape(client: ServerClient) -> Scrape | Finding:
    try:
        return parse(client.metrics(), 0.0)
    except (ServerError, ScrapeError) as error:
        return AREA.fail(
            "metrics",
            str(error),
            expected="vLLM's metrics",
            fix="start the server without --disable-log-stats, and ask it directly, not a proxy",
        )


def check_metrics(scrape: Scrape) -> Finding:
    """All our metrics are on ``/metrics``."""
    names = [each.sample_name for each in METRICS]
    missing = [name for name in names if not scrape.has(name)]
    if not missing:
        return AREA.ok("metrics", f"all {len(names)} of ours are there")
    if len(missing) < len(names):
        return AREA.warn(
            "metrics",
            f"missing: {', '.join(missing)}",
            expected=f"the {len(names)} metrics of this release",
            fix="the server runs another release of meridian_patch: install the same, restart it",
        )
    is_vllm = any(name.startswith("vllm:") for name in scrape.samples)
    if is_vllm and not scrape.has(RUNNING):
        return AREA.fail(
            "metrics",
            f"no {RUNNING} and none of ours: the server runs with --disable-log-stats",
            expected="a patched server that exports its statistics",
            fix="start the server without --disable-log-stats",
        )
    stock = "vLLM's metrics, none of ours: it runs stock, or has --scheduler-cls alone"
    found = stock if is_vllm else "no metrics of vLLM"
    return AREA.fail(
        "metrics",
        found,
        expected="a patched server",
        fix=_PATCHED
        if is_vllm
        else "start it without --disable-log-stats, or give the address of vLLM's own server",
    )


def check_counters(scrape: Scrape) -> Iterator[Finding]:
    """Counters that stand for trouble."""
    off = _above_zero(scrape.by("meridian_parts_off_total", "part"))
    if off:
        yield AREA.fail(
            "parts",
            f"switched off after failures: {off}",
            expected="none is off",
            fix="read the first traceback in the server's log and report it, then restart",
        )
    else:
        yield AREA.ok("parts", "none was switched off")
    fallbacks = scrape.by("meridian_policy_fallbacks_total", "reason")
    # Told as a part that is off.
    fallbacks.pop("kv_integrity", None)
    slow, ran = fallbacks.pop("slow", 0.0), scrape.total("meridian_steps_total", kind="ran") or 0.0
    failed = _above_zero(fallbacks)
    if failed:
        yield AREA.fail(
            "steps",
            f"steps in which the plug-in failed: {failed}",
            expected="0",
            fix="read the first traceback in the server's log and report it",
        )
    elif slow > _MANY_SLOW * ran and slow > 1:
        yield AREA.warn(
            "steps",
            f"{slow:.0f} of about {ran:.0f} steps had decisions that were too slow",
            expected=f"less than {_MANY_SLOW:.0%}",
            fix="raise MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US, or give EngineCore a core",
        )
    else:
        yield AREA.ok("steps", f"none failed, {slow:.0f} slow decisions")
    lost = _above_zero(
        {
            "lost probes": scrape.total("meridian_probes_total", result="lost") or 0.0,
            "invalid probes": scrape.total("meridian_probes_total", result="invalid") or 0.0,
            "invalid signals": scrape.total("meridian_invalid_signals_total") or 0.0,
            "ends of all probing": scrape.total("meridian_probing_stopped_total") or 0.0,
        }
    )
    if lost:
        yield AREA.warn(
            "signals",
            lost,
            expected="none",
            fix="check with meridian status that every worker is patched; look for NaN in its log",
        )
    else:
        yield AREA.ok("signals", "none lost, none invalid")


def check_processes(is_local: bool, reports: Reports) -> Finding:
    """The server's processes live and have all patches."""
    check = "processes"
    if not is_local:
        return AREA.skip(check, "the server is on another machine: run meridian status there")
    cores = [report for report in reports if report.get("role") == "engine_core"]
    if not cores:
        return AREA.warn(
            check,
            "no patched engine process of this user is seen",
            expected="the server's engine process",
            fix="run this as the server's user, in its container, with its "
            "MERIDIAN_PATCH_STATUS_DIR",
        )
    unpatched = [
        f"{report['pid']} ({patch['patch']})"
        for report in reports
        for patch in report.get("patches", ())
        if "applied" not in patch["outcome"]
    ]
    if unpatched:
        return AREA.fail(
            check,
            f"patches are not in force in process {', '.join(unpatched)}",
            expected="all patches in all processes",
            fix="meridian status --verbose says what differs",
        )
    pids = ", ".join(str(report["pid"]) for report in cores)
    return AREA.ok(check, f"{len(reports)} patched, engine in {pids}")


def _above_zero(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if count > 0)
