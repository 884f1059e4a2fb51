"""The blocks that `meridian status` prints."""

import io

import pytest
from rich.console import Console

from meridian_patch.config.policy import RULES
from meridian_patch.engine import front_end
from meridian_patch.operate.status_command import families
from meridian_patch.operate.status_view import Process, duration, is_live, print_blocks

WIDTH = 80
CHECKS = [
    {"name": "version", "ok": True, "is_hard": True, "detail": "0.32.0 is in >=0.32,<0.34"},
    {"name": "build", "ok": True, "is_hard": True, "detail": "meridian_patch.a." + "long" * 30},
]
NAMES = ("scheduler", "async_scheduler", "kv_cache_manager", "scheduler_stats", "worker")
PATCHES = [{"patch": name, "outcome": "applied", "checks": CHECKS} for name in NAMES]
CORE = {
    "pid": 9055,
    "parent_pid": 8769,
    "role": "engine_core",
    "command": "/usr/bin/vllm serve " + "/models/Qwen3-8B " * 12,
    "vllm_version": "0.32.0",
    "mode": "strict",
    "patches": PATCHES,
    "scheduler": "AsyncPhaseScheduler",
    "scheduler_base": "AsyncScheduler",
    "policy": "latency",
    "rules": ["order", "step_cut", "time_sharing"],
    "model": "Qwen/Qwen3-8B",
    "family": "qwen3",
    "kv_tiers": "strip",
    "exit": "observe",
    "limited_by": None,
}
LAUNCHER = {"pid": 8769, "role": "launcher", "vllm_version": "0.32.0", "patches": PATCHES}
SERVER = LAUNCHER | {"is_server": True}


def shown(*reports, verbose=False, is_terminal=False):
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=WIDTH,
        highlight=False,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
    )
    seen = {8769: {"ports": (8000,), "age_s": 7560.0}, 9055: {"age_s": 7500.0}}
    processes = families(Process(report, **seen.get(report["pid"], {})) for report in reports)
    print_blocks(console, processes, verbose=verbose)
    return stream.getvalue()


def words(text):
    return " ".join(text.split())


def test_a_process_is_a_short_block_of_80_columns():
    """Process, version, policy, model and modes: seven lines, not a page of "applied"."""
    text = shown(CORE, SERVER)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 9
    assert text.startswith("API server  pid 8769  port 8000  vLLM 0.32.0  up 2 h 6 min\n")
    assert "\n  engine_core  pid 9055  vLLM 0.32.0  strict  up 2 h 5 min\n" in text
    off = ", ".join(rule for rule in RULES if rule not in CORE["rules"])
    assert f"latency: order, step_cut, time_sharing (not on: {off})" in words(text)
    for part in (
        "5 of 5 live",
        "Qwen/Qwen3-8B, family qwen3",
        "early exit observe, KV tiers strip",
    ):
        assert part in text
    assert "applied" not in text


def test_verbose_shows_every_patch_within_80_columns():
    """Each patch with its checks, and the command line."""
    text = shown(CORE, verbose=True)
    assert max(map(len, text.splitlines())) <= WIDTH
    for name in NAMES:
        assert f"{name}: applied" in text
    assert "0.32.0 is in >=0.32,<0.34" in text
    assert "/usr/bin/vllm serve" in text


@pytest.mark.parametrize(
    ("fact", "expected"),
    (
        ({"parts_off": ["the policy"]}, "off the policy: failed in 10 of 100 steps"),
        ({"probes": "off: several KV groups"}, "off probes: several KV groups"),
        ({"exit_signals": "none: a worker is not patched"}, "signals: a worker is not patched"),
        ({"kv_tiers_off": "prefix caching is off"}, "off KV tiers: prefix caching is off"),
        ({"rules_off": {"balance": "no rank"}}, "off rule balance: no rank"),
        ({"limited_by": "the external launcher"}, "limits the external launcher"),
        ({"family": None}, "off phases: the model's think boundaries are unknown"),
    ),
)
def test_what_is_off_is_named_with_its_reason(fact, expected):
    """An operator need not read the log to see what does not work."""
    assert expected in words(shown(CORE | fact))
    assert expected not in words(shown(CORE))


def test_a_refused_patch_is_named_with_what_differs():
    """The count alone would not say which, or why."""
    broken = {"name": "parameters", "ok": False, "is_hard": True, "detail": "schedule takes (x)"}
    patches = [*PATCHES[1:], PATCHES[0] | {"outcome": "contract_broken", "checks": [broken]}]
    report = CORE | {"patches": patches}
    text = words(shown(report))
    assert "4 of 5 live" in text
    assert "REFUSED scheduler: contract broken; schedule takes (x)" in text
    assert not is_live(Process(report))
    assert is_live(Process(CORE))


def test_an_engine_that_its_api_server_has_lost_is_red():
    """One line in place of what was live in it; the command fails."""
    ended = CORE | {"has_ended": True}
    text = shown(SERVER, ended, is_terminal=True)
    line = text.splitlines()[-1]
    assert line.startswith("  \x1b[1;31mengine_core\x1b[0m")
    assert "  pid 9055  has ENDED" in line
    assert "scheduler" not in text
    assert not is_live(Process(ended))


def test_a_program_may_end_its_engine():
    """It listens on a port, as a notebook does, and serves no clients."""
    worker = {"pid": 9056, "parent_pid": 9055, "role": "worker"}
    processes = [
        Process(LAUNCHER, ports=(8888,)),
        Process(CORE | {"has_ended": True}),
        Process(worker),
    ]
    # What lives and belongs to it is shown.
    assert [process.report["pid"] for process in families(processes)] == [8769, 9056]
    assert "8888" not in shown(LAUNCHER)


@pytest.mark.parametrize("fact", ({"is_server": True}, {"front_end": "rust"}), ids=str)
def test_a_server_misses_its_engine_whatever_it_listens_on(fact):
    """A UNIX socket is no port, and sockets of other users' processes are not known."""
    processes = [Process(LAUNCHER | fact), Process(CORE | {"has_ended": True})]
    assert [each.report["pid"] for each in families(processes)] == [8769, 9055]
    assert "API server pid 8769" in words(shown(LAUNCHER | fact))


def test_engines_belong_to_all_processes_of_a_server():
    """The first one has started them, and takes no requests itself."""
    of_clients = {"pid": 8770, "parent_pid": 8769, "role": "launcher", "is_server": True}
    processes = map(Process, (LAUNCHER, of_clients, CORE | {"has_ended": True}))
    assert [each.report["pid"] for each in families(processes)] == [8769, 8770, 9055]


def test_servers_stand_apart():
    """Each engine is below its own API server, whatever their process ids."""
    reports = [
        {"pid": pid, "parent_pid": parent, "role": role}
        for pid, parent, role in (
            (5, 1, "launcher"),
            (9, 1, "launcher"),
            (6, 9, "engine_core"),
            (10, 5, "engine_core"),
            (11, 10, "worker"),
        )
    ]
    ordered = families(map(Process, reports))
    found = [(each.report["pid"], each.depth) for each in ordered]
    assert found == [(5, 0), (10, 1), (11, 2), (9, 0), (6, 1)]


def test_colours_are_for_terminals():
    """A pipe gets plain text."""
    assert "\x1b[" in shown(CORE, is_terminal=True)
    assert "\x1b[" not in shown(CORE)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    ((5.9, "5 s"), (600, "10 min"), (7500, "2 h 5 min"), (90000, "1 d 1 h")),
)
def test_durations_have_two_units(seconds, expected):
    assert duration(seconds) == expected


def test_a_report_of_an_older_process_is_shown():
    """A process that has published nothing but itself has a block too."""
    assert "pid 7" in shown({"pid": 7, "role": "launcher"})


def test_the_rust_front_end_is_named_with_what_is_missing():
    """The patches of the API server are bound, and act nowhere."""
    patches = [*PATCHES, {"patch": "chat_serving", "outcome": "applied"}]
    core = CORE | {
        "front_end": "rust",
        "patches": patches,
        "metrics": "http://127.0.0.1:18000/metrics",
    }
    text = shown(core)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "6 of 6 live; 2 are of vLLM's Python front end, which does not run" in words(text)
    assert f"vLLM's front end in Rust has no patches: {front_end.MISSING}" in words(text)
    assert "http://127.0.0.1:18000/metrics" in text
    python = shown(core | {"front_end": "python"})
    assert "Rust" not in python
    assert "6 of 6 live" in python
    assert "does not run" not in python
    assert "a port is taken" in shown(core | {"metrics_off": "a port is taken"})
