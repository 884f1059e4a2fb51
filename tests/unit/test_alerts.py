"""Each alert on made-up series: silent on a healthy server, fires in a fault, ends after it.

``promtool test rules`` evaluates the files as they are, minute by minute.
"""

import math

import pytest
import yaml
from alerting import ALERTS, RULES, promtool, rules_of

MINUTES = 150
FAULT = range(40, 90)
SERVER = {"job": "vllm", "instance": "a:8000", "model_name": "m", "engine": "0"}
PHASES = ("prefill", "think", "answer")


def series(name, **labels):
    told = ", ".join(f'{label}="{value}"' for label, value in (SERVER | labels).items())
    return f"{name}{{{told}}}"


def gauge(usual, in_fault=None):
    """Values by minute."""
    other = usual if in_fault is None else in_fault
    return [other if minute in FAULT else usual for minute in range(MINUTES)]


def counter(usual, in_fault=None):
    """The same of a counter, from its increase per minute."""
    values, total = [], 0.0
    for increase in gauge(usual, in_fault):
        total += increase
        values.append(total)
    return values


def once(number):
    """A counter that rises as the fault begins and is 0 again after the restart that ends it."""
    return gauge(0, number)


GAPS = "meridian_inter_token_seconds"
TTFAT = "meridian_time_to_first_answer_token_seconds"
# What a busy server tells that has no trouble.
HEALTHY = {
    series(f"{GAPS}_bucket", phase="answer", le="1.0"): counter(5999),
    series(f"{GAPS}_bucket", phase="answer", le="+Inf"): counter(6000),
    series(f"{GAPS}_count", phase="answer"): counter(6000),
    series(f"{TTFAT}_bucket", thought="yes", le="30.0"): counter(60),
    series(f"{TTFAT}_bucket", thought="yes", le="120.0"): counter(60),
    series(f"{TTFAT}_bucket", thought="yes", le="+Inf"): counter(60),
    series("meridian_request_phase_seconds_bucket", phase="think", le="30.0"): counter(60),
    series("meridian_request_phase_seconds_bucket", phase="think", le="+Inf"): counter(60),
    'up{job="vllm", instance="a:8000"}': gauge(1),
    series("vllm:num_requests_running"): gauge(8),
    series("vllm:generation_tokens_total"): counter(6000),
    series("vllm:prompt_tokens_total"): counter(9000),
    series("meridian_switches_total", to="policy noop"): gauge(2),
    series("meridian_switches_total", to="policy latency"): gauge(2),
    series("vllm:num_requests_waiting"): gauge(3),
    **{series("meridian_requests", phase=phase): gauge(3) for phase in PHASES},
    **{series("meridian_phase_changes_total", phase=phase): counter(60) for phase in PHASES},
    series("meridian_preemptions_total", phase="think"): counter(6),
    series("meridian_preemptions_total", phase="answer"): counter(0),
    series("meridian_parts_off_total", part="the policy"): gauge(0),
    series("meridian_policy_fallbacks_total", reason="exception"): counter(0),
    series("meridian_policy_fallbacks_total", reason="slow"): counter(2),
    series("meridian_probing_stopped_total", reason="lost"): counter(0),
    series("meridian_probing_stopped_total", reason="refused"): counter(0),
    series("meridian_steps_total", kind="ran"): counter(3000),
    series("meridian_steps_total", kind="learnt"): counter(2900),
    series("meridian_step_seconds_total", kind="measured"): counter(55),
    series("meridian_step_seconds_total", kind="error"): counter(6),
    series("meridian_exits_given_up_total", reason="grammar"): counter(2),
    series("meridian_exits_given_up_total", reason="logit_bias"): counter(0),
    series("meridian_thoughts_ended_total", reason="natural"): counter(40),
    series("meridian_thoughts_ended_total", reason="eat"): counter(20),
    series("meridian_thoughts_ended_total", reason="unanswered"): counter(1),
    series("meridian_unanswered_requests_total", finish_reason="length"): counter(1),
    series("meridian_unanswered_requests_total", finish_reason="stop"): counter(0),
    series("meridian_probes_total", result="measured"): counter(600),
    series("meridian_probes_total", result="lost"): counter(1),
    series("meridian_probes_total", result="invalid"): counter(0),
    series("meridian_invalid_signals_total", phase="think"): counter(0),
}
# Fault -> the alert, and what is otherwise while it lasts.
FAULTS = {
    "another load takes the cores": (
        "MeridianAnswersStall",
        {series(f"{GAPS}_bucket", phase="answer", le="1.0"): counter(5999, 5900)},
    ),
    "each long answer halts once": (
        "MeridianAnswersStall",
        {series(f"{GAPS}_bucket", phase="answer", le="1.0"): counter(5999, 5980)},
    ),
    "requests wait before they think": (
        "MeridianFirstAnswerSlow",
        {series(f"{TTFAT}_bucket", thought="yes", le="30.0"): counter(60, 10)},
    ),
    "the server is gone": (
        "MeridianTargetDown",
        {'up{job="vllm", instance="a:8000"}': gauge(1, 0)},
    ),
    "the engine hangs": (
        "MeridianNothingGenerated",
        {
            series("vllm:generation_tokens_total"): counter(6000, 0),
            series("vllm:prompt_tokens_total"): counter(9000, 0),
        },
    ),
    "the policy was switched off and forgotten": (
        "MeridianPolicyOff",
        {series("meridian_switches_total", to="policy noop"): gauge(2, 3)},
    ),
    "more requests than seats": (
        "MeridianRequestsWait",
        {series("vllm:num_requests_waiting"): gauge(3, 20)},
    ),
    "thoughts outgrow the cache": (
        "MeridianThinkingPreempted",
        {series("meridian_preemptions_total", phase="think"): counter(6, 45)},
    ),
    "answers outgrow the cache": (
        "MeridianAnswersPreempted",
        {series("meridian_preemptions_total", phase="answer"): counter(0, 6)},
    ),
    "the API server alone is patched": (
        "MeridianNotActive",
        {series("meridian_requests", phase=phase): gauge(3, 0) for phase in PHASES},
    ),
    "nothing is patched": (
        "MeridianNotActive",
        {series("meridian_requests", phase=phase): gauge(3, math.nan) for phase in PHASES},
    ),
    "a part fails": (
        "MeridianPartOff",
        {series("meridian_parts_off_total", part="the policy"): once(1)},
    ),
    "decisions are slow": (
        "MeridianStepsFallBack",
        {series("meridian_policy_fallbacks_total", reason="slow"): counter(2, 60)},
    ),
    "step times jump": (
        "MeridianStepTimesOff",
        {series("meridian_step_seconds_total", kind="error"): counter(6, 40)},
    ),
    "steps are not learnt from": (
        "MeridianStepTimesOff",
        {series("meridian_steps_total", kind="learnt"): counter(2900, 2000)},
    ),
    "biases undo closes": (
        "MeridianClosesRefused",
        {series("meridian_exits_given_up_total", reason="logit_bias"): counter(0, 40)},
    ),
    "thoughts take all of max_tokens": (
        "MeridianRequestsUnanswered",
        {
            series("meridian_unanswered_requests_total", finish_reason="length"): counter(1, 10),
            series("meridian_thoughts_ended_total", reason="unanswered"): counter(1, 10),
        },
    ),
    "workers measure nothing": (
        "MeridianSignalsLost",
        {series("meridian_probes_total", result="lost"): counter(1, 100)},
    ),
    "probing has stopped": (
        "MeridianSignalsLost",
        {series("meridian_probing_stopped_total", reason="lost"): once(1)},
    ),
    "workers refuse to measure": (
        "MeridianSignalsLost",
        {
            series("meridian_probing_stopped_total", reason="refused"): once(1),
            series("meridian_probes_total", result="measured"): counter(600, 0),
            series("meridian_probes_total", result="lost"): counter(1, 0),
        },
    ),
    "logits hold NaN": (
        "MeridianSignalsLost",
        {series("meridian_invalid_signals_total", phase="think"): counter(0, 5)},
    ),
}
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


def check(tmp_path, told, firing_by_minute, never=()):
    """Run Prometheus's unit test of one server.

    Args:
        told: values by minute, by series; NaN is a gap.
        firing_by_minute: minute to the alerts that fire then.
        never: expressions that have no value at the end.
    """
    write = {True: "_", False: "{:g}"}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join(write[math.isnan(v)].format(v) for v in values)}
            for name, values in told.items()
        ],
        "promql_expr_test": [
            {
                "expr": FIRING,
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1} for name in names
                ],
            }
            for minute, names in firing_by_minute.items()
        ]
        + [
            {"expr": expression, "eval_time": f"{MINUTES - 1}m", "exp_samples": []}
            for expression in never
        ],
    }
    file = tmp_path / "test.yml"
    files = [str(RULES), str(ALERTS)]
    file.write_text(
        yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": [test]})
    )
    assert "SUCCESS" in promtool("test", "rules", file)


def test_every_alert_has_a_fault():
    assert {alert for alert, _ in FAULTS.values()} == set(rules_of(ALERTS))


def test_a_healthy_server_is_silent(tmp_path):
    check(tmp_path, HEALTHY, dict.fromkeys(range(0, MINUTES, 10), ()))


QUIET = {
    "thoughts are long, and answers begin right behind them": {
        series(f"{TTFAT}_bucket", thought="yes", le="30.0"): counter(60, 10),
        series("meridian_request_phase_seconds_bucket", phase="think", le="30.0"): counter(60, 10),
        series("meridian_request_phase_seconds_bucket", phase="think", le="120.0"): counter(60),
    },
    "a target of another program is down": {
        'up{job="node", instance="b:9100"}': gauge(1, 0),
    },
    "an engine computes embeddings alone": {
        series("vllm:generation_tokens_total"): counter(0),
    },
    "a single long answer halts every four minutes, and none begins": {
        series(f"{GAPS}_bucket", phase="answer", le="1.0"): counter(5999.75),
        series("meridian_phase_changes_total", phase="answer"): counter(0),
    },
    "an answer halts now and then": {
        series(f"{GAPS}_bucket", phase="answer", le="1.0"): counter(5999, 5995),
    },
    "an answer is preempted now and then": {
        series("meridian_preemptions_total", phase="answer"): counter(0, 1),
    },
    "policy noop, or prompts in every step: no time is predicted": {
        series("meridian_steps_total", kind="learnt"): counter(0),
        series("meridian_step_seconds_total", kind="measured"): counter(0),
        series("meridian_step_seconds_total", kind="error"): counter(0),
    },
    "the policy is off: no step is counted, and another part fails once": {
        series("meridian_steps_total", kind="ran"): counter(0),
        series("meridian_steps_total", kind="learnt"): counter(0),
        series("meridian_policy_fallbacks_total", reason="exception"): counter(0, 1),
        series("meridian_policy_fallbacks_total", reason="slow"): counter(0),
    },
    "probes lost now and then in a long life, and then thoughts without probes": {
        series("meridian_probes_total", result="lost"): gauge(33),
        series("meridian_probes_total", result="measured"): gauge(118_000),
    },
}


@pytest.mark.parametrize("state", QUIET)
def test_what_is_no_fault_is_silent(tmp_path, state):
    check(tmp_path, HEALTHY | QUIET[state], dict.fromkeys(range(0, MINUTES, 10), ()))


@pytest.mark.parametrize(
    ("waiting", "alerts"),
    [
        # Their number goes up and down as they come and clients leave.
        ([20 + minute % 2 for minute in range(MINUTES)], ["MeridianNothingGenerated"]),
        ([1] * MINUTES, []),
    ],
    ids=["for KV that does not come", "as a session that is idle"],
)
def test_requests_that_all_wait_are_a_standstill_where_their_number_changes(
    tmp_path, waiting, alerts
):
    still = {
        series("vllm:num_requests_running"): [0] * MINUTES,
        series("vllm:num_requests_waiting"): waiting,
        series("vllm:generation_tokens_total"): counter(0),
        series("vllm:prompt_tokens_total"): counter(0),
    }
    check(tmp_path, HEALTHY | still, {75: (*alerts, "MeridianRequestsWait")})


def test_a_server_without_requests_is_silent(tmp_path):
    """Nothing is divided by: no ratio is a number."""
    idle = {name: [float(name.startswith("up{"))] * MINUTES for name in HEALTHY}
    check(tmp_path, idle, dict.fromkeys(range(0, MINUTES, 10), ()))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_alert_fires_in_its_fault_and_ends_after_it(tmp_path, fault):
    """And no other one does."""
    alert, changed = FAULTS[fault]
    # Windows of up to 15 minutes still hold the fault, and some alerts wait for 15 minutes.
    minutes = dict.fromkeys((0, 10, 20, 39), ())
    minutes |= dict.fromkeys((65, 75, 89), (alert,))
    minutes |= dict.fromkeys((106, 120, 149), ())
    check(tmp_path, HEALTHY | changed, minutes)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_minute_of_trouble_wakes_up_no_one(tmp_path, fault):
    changed = FAULTS[fault][1]
    trouble = {name: in_minutes(name, values, {40}) for name, values in changed.items()}
    check(tmp_path, HEALTHY | trouble, dict.fromkeys((40, 45, 50, 60), ()))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_alert_does_not_flap(tmp_path, fault):
    """In a fault that comes and goes by the minute it fires once at most, and ends."""
    changed = FAULTS[fault][1]
    every_other = {name: in_minutes(name, v, set(FAULT[::2])) for name, v in changed.items()}
    now, before = (f'ALERTS{{alertstate="firing"}}{offset}' for offset in ("", " offset 1m"))
    begins = f"sum by (alertname) (count_over_time(({now} unless {before})[{MINUTES}m:1m])) > 1"
    check(tmp_path, HEALTHY | every_other, {MINUTES - 1: ()}, [begins])


def in_minutes(name, values, minutes):
    """Values by minute with a fault's change in these minutes alone."""
    usual, is_total = HEALTHY[name], name.split("{")[0].endswith(("_total", "_bucket"))
    if not (is_total and values[-1] != usual[-1]):
        return [values[FAULT[0]] if minute in minutes else v for minute, v in enumerate(usual)]
    extra = values[FAULT[0]] - usual[FAULT[0]]
    return [v + extra * sum(m <= minute for m in minutes) for minute, v in enumerate(usual)]
