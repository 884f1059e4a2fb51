"""A request that asks for thoughts to be closed is told what stood against it."""

from functools import partial

import pytest
from exit_driver import exit_driver, is_empty, thinker, told
from scheduler_driver import THINK_END, WORD, Driver, Job, engine_config
from vllm.v1.core.sched.scheduler import Scheduler

from meridian_patch.engine.early_exit import close_checks, report
from meridian_patch.engine.scheduler import assembly, guard
from meridian_patch.engine.scheduler.scheduler import build_phase_scheduler
from meridian_patch.exit.actions import ExitReport, Obstacle

EAT = {"meridian_exit": "enforce", "meridian_eat_delta": 4.0}
CAP = {"meridian_exit": "enforce", "meridian_max_think_tokens": 40}
OTHER = WORD + 1
# The tiny reasoner's token of a line break.
NEWLINE = 198


@pytest.fixture
def driver_for(monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model, EXIT__MODE="observe")


def run(driver, asked, think_tokens=120, sampling=None, **job):
    """What a single request is told last."""
    seen = told(driver)
    driver.add(thinker("r", think_tokens, **job), asked)
    for name, value in (sampling or {}).items():
        setattr(driver.scheduler.requests["r"].sampling_params, name, value)
    driver.drain()
    assert is_empty(driver)
    return seen["r"][-1] if "r" in seen else None


UNDONE = {
    "allowed_tokens": {"allowed_token_ids": [WORD]},
    "bad_words": {"_bad_words_token_ids": [[OTHER], [WORD, THINK_END]]},
    "logit_bias": {"logit_bias": {OTHER: float("inf")}},
    "min_tokens": {"min_tokens": 90, "_all_stop_token_ids": {THINK_END}},
    "trace_replay": {"trace_decode_token_ids": [WORD]},
    "budget": {"thinking_token_budget": 42},
}


@pytest.mark.parametrize("why", UNDONE)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_would_be_undone(driver_for, is_async, why):
    """The close is given up, counted, and told with the strategy that wanted it."""
    driver = driver_for(is_async=is_async)
    said = run(driver, CAP, sampling=UNDONE[why])
    assert not driver.forced
    assert said.not_enforced == {"hard_cap": why}
    assert driver.scheduler.phase_counters.totals[f"exit_given_up:{why}"] == 1


class Lines(Job):
    """Its thought has lines of ten tokens."""

    def token(self, index):
        return NEWLINE if index % 10 == 9 and index < self.think_tokens else super().token(index)


def lines(name, think_tokens):
    return Lines(**vars(thinker(name, think_tokens)))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_close_is_tried_again_when_the_obstacle_is_gone(driver_for, is_async):
    """At the end of a line; it is counted once as given up, and told once it is certain."""
    driver = driver_for(is_async=is_async)
    seen = told(driver)
    driver.add(lines("r", 120), CAP)
    driver.add(lines("short", 60), CAP)
    for name in ("r", "short"):
        for field, value in UNDONE["min_tokens"].items():
            setattr(driver.scheduler.requests[name].sampling_params, field, value)
    driver.drain()
    assert driver.forced == [("r", THINK_END)]
    assert seen["r"][0].not_enforced == {"hard_cap": "min_tokens"}
    last = seen["r"][-1]
    assert not last.not_enforced
    assert last.outcome.reason == "hard_cap"
    assert 90 < last.think_tokens <= 103
    assert seen["short"][-1].outcome.reason == "natural"
    assert seen["short"][-1].not_enforced == {"hard_cap": "min_tokens"}
    assert driver.scheduler.phase_counters.totals["exit_given_up:min_tokens"] == 2
    assert is_empty(driver)


def test_a_close_that_a_grammar_rejects_is_tried_again(driver_for):
    """It may accept the end of the thought at the end of a later line."""
    driver = driver_for()
    seen = told(driver)
    asked = []

    def accepts(request, token_ids):
        asked.append(request.num_output_tokens)
        return request.num_output_tokens >= 70

    driver.scheduler.early_exit.forced_closes.checks.accepts = accepts
    driver.add(lines("r", 120), CAP)
    driver.drain()
    assert driver.forced == [("r", THINK_END)]
    assert not seen["r"][-1].not_enforced
    assert [count for count in asked if count < 70] == [40, 50, 60]
    assert driver.scheduler.phase_counters.totals["exit_given_up:grammar"] == 1
    assert is_empty(driver)


def test_a_close_that_is_refused_again_and_again_costs_few_steps(driver_for):
    """A grammar accepts it at the start of a line alone, and another token is on the way then."""
    driver = driver_for(is_async=True, blocks=400)
    skipped = 0

    def accepts(request, token_ids):
        return request.all_token_ids[-1] == NEWLINE

    driver.scheduler.early_exit.forced_closes.checks.accepts = accepts
    driver.add(lines("r", 400), CAP)
    while driver.scheduler.has_unfinished_requests():
        skipped += "r" not in driver.step().num_scheduled_tokens
    driver.drain()
    assert not driver.forced
    assert skipped < 10
    assert driver.scheduler.phase_counters.totals["exit_given_up:grammar"] == 1
    assert is_empty(driver)


FINE = {
    "allowed": {"allowed_token_ids": [WORD, THINK_END]},
    "bad words": {"_bad_words_token_ids": [[THINK_END, WORD]]},
    "bias": {"logit_bias": {THINK_END: -100.0, WORD: 100.0}},
    "min_tokens": {"min_tokens": 90},
    "min_tokens in time": {"min_tokens": 20, "_all_stop_token_ids": {OTHER}},
    "budget": {"thinking_token_budget": 60},
    "no budget": {"thinking_token_budget": -1},
}


@pytest.mark.parametrize("what", FINE)
def test_what_stands_behind_the_masks_and_undoes_nothing(driver_for, what):
    """The thought is closed, and nothing is told but that."""
    driver = driver_for()
    said = run(driver, CAP, sampling=FINE[what])
    assert driver.forced == [("r", THINK_END)]
    assert said.outcome.reason == "hard_cap"
    assert not said.not_enforced


def test_custom_logits_processors(driver_for, monkeypatch):
    """Installed in the server: they may do anything to a forced token."""
    monkeypatch.setattr(close_checks, "entry_points", lambda group: [group])
    driver = driver_for()
    assert run(driver, CAP).not_enforced == {"hard_cap": "logits_processors"}
    assert not driver.forced


def test_nothing_is_measured(driver_for):
    """As with --scheduler-cls alone: told with the first tokens, for the thought may never end."""
    driver = driver_for(is_tapped=False)
    seen = told(driver)
    driver.add(thinker("r"), EAT)
    for _ in range(5):
        driver.step()
    [said] = seen["r"]
    assert said == ExitReport(None, 0, {"eat": "no_signals", "rpdi": "no_signals"})
    driver.drain()
    assert seen["r"][-1].outcome.reason == "natural"
    assert seen["r"][-1].not_enforced == said.not_enforced


def test_what_is_lost_while_a_thought_is_under_way(driver_for):
    """A worker that stops measuring: told with the next tokens that are looked at, once."""
    driver = driver_for(EXIT__EAT_WARMUP_PROBES="20")
    seen = told(driver)
    driver.add(thinker("r", 300), EAT)
    driver.add(thinker("observed", 300))
    for _ in range(50):
        driver.step()
    assert not seen
    driver.scheduler.early_exit.lost({"eat": Obstacle.NO_SIGNALS})
    for _ in range(30):
        driver.step()
    assert seen == {"r": [ExitReport(None, 0, {"eat": "no_signals"})]}
    driver.drain()
    assert seen["r"][-1].not_enforced == {"eat": "no_signals", "rpdi": "warm_up"}
    assert not seen["observed"][-1].not_enforced
    assert is_empty(driver)


def test_nothing_can_be_probed(driver_for, demo_model):
    """Without prefix caching."""
    driver_for()
    config = engine_config(demo_model, is_async=False, blocks=200, enable_prefix_caching=False)
    driver = Driver.build(build_phase_scheduler(Scheduler), config, is_async=False)
    seen = told(driver)
    driver.add(thinker("r"), EAT)
    driver.drain()
    assert seen["r"][-1].not_enforced["eat"] == "no_prefix_cache"


@pytest.mark.parametrize(
    ("think_tokens", "settings", "expected"),
    [
        (15, {}, {"eat": "floor", "rpdi": "floor"}),
        (100, {"EXIT__EAT_WARMUP_PROBES": "20"}, {"eat": "warm_up", "rpdi": "warm_up"}),
        (100, {"EXIT__EAT_WARMUP_PROBES": "20", "EXIT__RPDI": "false"}, {"eat": "warm_up"}),
        # It judged, and found nothing.
        (100, {"EXIT__EAT_MAX_ENTROPY_NATS": "0.1", "EXIT__RPDI": "false"}, {}),
    ],
)
def test_a_thought_that_is_too_short(driver_for, think_tokens, settings, expected):
    """Its end came before a strategy could judge."""
    driver = driver_for(**settings)
    assert run(driver, EAT, think_tokens).not_enforced == expected
    assert not driver.forced


def test_a_thought_that_never_ends(driver_for):
    """Told with its last token, where the room for warm-up was missing."""
    driver = driver_for(EXIT__EAT_WARMUP_PROBES="20", EXIT__RPDI="false")
    outcome, think_tokens, not_enforced, _ = run(driver, EAT, 400, max_tokens=90)
    assert (outcome.reason, outcome.think_tokens, think_tokens) == ("unanswered", 90, 90)
    assert not_enforced == {"eat": "warm_up"}


def test_an_aborted_request_is_told_nothing(driver_for):
    """Nothing waits for a step that may never come."""
    driver = driver_for(EXIT__EAT_WARMUP_PROBES="20")
    driver.add(thinker("r", 400), EAT)
    for _ in range(60):
        driver.step()
    driver.abort("r")
    assert not driver.scheduler.early_exit.reports.drain()
    assert driver.scheduler.early_exit.is_idle


def test_probes_that_get_no_place(driver_for):
    """With all seats taken, in a server that does not keep any for probes."""
    driver = driver_for(EXIT__RPDI="false")
    driver.scheduler.max_num_running_reqs = driver.scheduler.max_num_active_reqs = 1
    assert run(driver, EAT, 200).not_enforced == {"eat": "not_probed"}


def test_a_model_without_boundaries(monkeypatch, demo_model):
    """Nothing of it thinks, as far as is known; told once, and nothing is kept."""
    monkeypatch.setattr(assembly, "resolve_boundaries", lambda *_: None)
    said = []
    monkeypatch.setattr(report, "attach_all", lambda _, told: said.append(told) if told else None)
    driver = exit_driver(monkeypatch, demo_model)
    assert driver.scheduler.early_exit is None
    driver.add(thinker("asks", 20), EAT)
    driver.add(thinker("does not", 20))
    driver.add(thinker("ends at once", 20, max_tokens=1), CAP)
    driver.add(thinker("aborted", 20), EAT)
    driver.abort("aborted")
    driver.drain()
    off = {"eat": "no_boundary", "rpdi": "no_boundary"}
    told = {name: each.not_enforced for news in said for name, each in news.items()}
    assert told == {"asks": off, "ends at once": off | {"hard_cap": "no_boundary"}}
    assert sum(len(news) for news in said) == 2
    assert not driver.scheduler._parts._parts[-1].reports


def test_early_exit_that_was_switched_off(driver_for, monkeypatch):
    """The circuit breaker stopped it: requests under way and new ones are told."""
    monkeypatch.setattr(guard.logger, "error", lambda *_args, **_: None)
    said = []
    monkeypatch.setattr(report, "attach_all", lambda _, told: said.append(told) if told else None)
    driver = driver_for()
    driver.add(thinker("runs", 150), CAP | {"meridian_max_think_tokens": 100})
    driver.add(thinker("answers", 2), CAP)
    driver.add(thinker("observed", 150))
    for _ in range(10):
        driver.step()
    monkeypatch.setattr(driver.scheduler.early_exit, "arrange", None)
    for _ in range(guard.MOST_FAILED_STEPS + 2):
        driver.step()
    assert driver.scheduler.early_exit is None
    driver.add(thinker("late", 100), CAP)
    driver.add(thinker("did not ask", 100))
    driver.drain()
    assert not driver.forced
    off = {"eat": "stopped", "rpdi": "stopped", "hard_cap": "stopped"}
    told = {name: each.not_enforced for news in said for name, each in news.items()}
    assert told == {"runs": off, "late": off}


def test_what_did_not_ask_is_not_told(driver_for):
    """Observed thoughts may not be closed, and their lengths are nothing to be sorry about."""
    driver = driver_for(is_tapped=False)
    assert not run(driver, None).not_enforced
    assert not run(driver, {"meridian_exit": "observe", "meridian_eat_delta": 4.0}).not_enforced
