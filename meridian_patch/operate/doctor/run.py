"""Runs all checks; one that fails itself is a finding too."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from meridian_patch import envs
from meridian_patch.config.load import load_config
from meridian_patch.engine.status import read_all
from meridian_patch.errors import ConfigError, MeridianError
from meridian_patch.operate.doctor.configuration import check_configuration
from meridian_patch.operate.doctor.environment import check_environment, check_gpu
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.operate.doctor.gpus import find_gpus
from meridian_patch.operate.doctor.handoff import check_handoff
from meridian_patch.operate.doctor.installed import Installed, read_installed
from meridian_patch.operate.doctor.model import check_model
from meridian_patch.operate.doctor.patches import check_binding, check_contracts
from meridian_patch.operate.doctor.server import check_server
from meridian_patch.operate.http_client import ServerClient, ServerError
from meridian_patch.patches.lock import load_lock

Checks = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to look at.

    Attributes:
        model: directory or cached name; None: no model.
        reasoning_parser: as given to the server.
        url: address of a running server; None: no server.
        api_key: sent to that server; None: none is sent.
        answer_urls: its answer engines; empty: those of the configuration.
        limit_s: most seconds that one read of its replies may take.
        is_quick: leave out the process that binds the patches.
    """

    model: str | None
    reasoning_parser: str | None
    url: str | None
    api_key: str | None
    limit_s: float
    is_quick: bool
    answer_urls: tuple[str, ...] = ()


def find_all(plan: Plan, env: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, those of a running server first; raises nothing.

    Args:
        plan: what to look at.
        env: the environment as the user gave it.
    """
    url = plan.url
    if url is not None:
        yield from _guarded("server", lambda: _check_url(plan, url))
        yield from _guarded("hand-off", lambda: _check_handoff(plan, url, env))
    try:
        installed = read_installed()
    except Exception as error:
        yield _broken("environment", error)
    else:
        yield from _guarded("environment", lambda: check_environment(installed, env))
        yield from _guarded("environment", lambda: [check_gpu(find_gpus(), installed)])
        yield from _guarded("environment", lambda: _check_patches(installed, env, plan))
    yield from _guarded("configuration", lambda: check_configuration(env))
    model = plan.model
    if model is not None:
        yield from _guarded("model", lambda: _quietly(check_model(model, plan.reasoning_parser)))


def _check_patches(installed: Installed, env: Mapping[str, str], plan: Plan) -> Iterator[Finding]:
    folder = installed.vllm_folder
    version = envs.assumed_vllm_version(env) or installed.vllm_version or ""
    try:
        entry = load_lock().get(Version(version).public)
    except InvalidVersion:
        entry = None
    area = Area("environment")
    if folder is None or entry is None:
        yield area.skip("contracts of the patches", "no vLLM of a checked release")
        return
    yield check_contracts(folder, entry)
    if plan.is_quick:
        yield area.skip("binding of the patches", "left out by --quick")
    else:
        yield check_binding(env)


def _check_url(plan: Plan, url: str) -> Iterator[Finding]:
    try:
        client = ServerClient(url, plan.api_key, plan.limit_s)
    except ServerError as error:
        yield Area("server").fail(
            "reachable", str(error), expected="http://host:port", fix="correct --url"
        )
        return
    try:
        reports = read_all() if client.is_local else []
    except MeridianError as error:
        reports = []
        yield Area("server").fail(
            "status files", str(error), expected="reports of this user", fix="delete that file"
        )
    yield from check_server(client, reports)


def _check_handoff(plan: Plan, url: str, env: Mapping[str, str]) -> Iterator[Finding]:
    try:
        config = load_config(env).config.handoff
    except ConfigError as error:
        if plan.answer_urls:
            yield Area("hand-off").skip("configuration", str(error))
        return
    urls = plan.answer_urls or config.answer_urls
    # Found to be wrong as an address of the server.
    with suppress(ServerError):
        think = ServerClient(url, plan.api_key, plan.limit_s)
        reports: list[dict[str, Any]] = []
        if urls and think.is_local:
            with suppress(MeridianError):
                reports = read_all()
        if urls:
            yield from check_handoff(think, urls, config, reports)


def _quietly(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, without what vLLM and transformers print on their way."""
    sink = io.StringIO()
    with redirect_stdout(sink), redirect_stderr(sink):
        return list(findings)


def _guarded(area: str, checks: Checks) -> Iterator[Finding]:
    """The findings of checks; an exception of theirs is a finding."""
    try:
        yield from checks()
    except Exception as error:
        yield _broken(area, error)


def _broken(area: str, error: Exception) -> Finding:
    return Area(area).fail(
        "the check itself",
        f"{type(error).__name__}: {' '.join(str(error).split())}",
        expected="a check that ends",
        fix="mend what the message names; if it is no fault of this machine, please report it",
    )
