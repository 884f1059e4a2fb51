"""Who is served first and who is preempted last."""

from typing import get_args

from meridian_patch.config.policy import RULES, PolicyConfig, PolicyName, PolicyRules
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.policy.running_order import LatencyPolicy, RequestView


def view(phase, computed=100, *, tokens=50, handed=True, prefilling=False, preemptions=0, kept=0):
    return RequestView(phase, tokens, handed, prefilling, computed, preemptions, kept)


def order(**views):
    policy = LatencyPolicy(protected_answer_tokens=16, max_preemptions=3)
    return sorted(views, key=lambda name: policy.rank(views[name]))


def test_standing_of_all_kinds():
    """Hand-off, answer, resuming answer, protected thinker, thinkers by work, prefill."""
    assert order(
        prefill=view(Phase.PREFILL, 900, prefilling=True),
        small_thinker=view(Phase.THINK, 10),
        resuming_thinker=view(Phase.THINK, 800, prefilling=True),
        big_thinker=view(Phase.THINK, 700),
        often_preempted=view(Phase.THINK, 1, preemptions=3),
        resuming_answer=view(Phase.ANSWER, prefilling=True),
        answer=view(Phase.ANSWER),
        handoff=view(Phase.ANSWER, tokens=15),
    ) == [
        "handoff",
        "answer",
        "resuming_answer",
        "often_preempted",
        "big_thinker",
        "small_thinker",
        "prefill",
        "resuming_thinker",
    ]


def test_answers_keep_the_stock_order():
    """Among answers nothing is reordered, whatever they have computed."""
    assert order(a=view(Phase.ANSWER, 5), b=view(Phase.ANSWER, 500)) == ["a", "b"]


def test_plain_answers_have_no_handoff():
    """A request that never thought stands with the answers from its first token."""
    assert order(old=view(Phase.ANSWER), new=view(Phase.ANSWER, tokens=1, handed=False)) == [
        "old",
        "new",
    ]


def test_thinkers_keep_the_stock_order_without_the_victims_rule():
    """What they have computed is of no account then, in rank or drift."""
    by_arrival = LatencyPolicy(protected_answer_tokens=16, max_preemptions=3, by_work=False)
    assert by_arrival.rank(view(Phase.THINK, 10)) == by_arrival.rank(view(Phase.THINK, 700))
    assert by_arrival.drift == {}


def test_what_an_offload_tier_keeps_is_no_work_lost():
    """Thinkers stand by what they would lose; prefill by what it has computed."""
    assert order(
        big_kept=view(Phase.THINK, 900, kept=880),
        small=view(Phase.THINK, 100),
        big=view(Phase.THINK, 700, kept=300),
        often_preempted=view(Phase.THINK, 900, preemptions=3, kept=900),
        resuming=view(Phase.THINK, 800, prefilling=True, kept=800),
        prefill=view(Phase.PREFILL, 200, prefilling=True),
    ) == ["often_preempted", "big", "small", "big_kept", "resuming", "prefill"]


def test_thinkers_whose_thinking_is_kept_do_not_drift():
    """What they lose stays the same while they go on."""
    policy = LatencyPolicy(protected_answer_tokens=16, max_preemptions=3, keeps_thinking=True)
    first, later = (policy.rank(view(Phase.THINK, n, kept=n)) for n in (10, 700))
    assert first == later
    assert policy.drift == {}


def test_each_rule_can_be_switched_off_alone():
    """Unset rules are the profile's; noop has none."""
    assert choose_rules(PolicyConfig(name="noop")).are_all_off
    for name in RULES:
        on, off = (choose_rules(PolicyConfig(**{name: value})) for value in (True, False))
        assert (getattr(on, name), getattr(off, name)) == (True, False)
        assert on.without(name) == off
        assert name in on.names_on


def test_each_policy_has_its_rules():
    """These at least; noop has none."""
    chosen = {
        name: set(choose_rules(PolicyConfig(name=name)).names_on) for name in get_args(PolicyName)
    }
    assert not chosen["noop"]
    assert chosen["latency"] >= {"order", "step_cut", "time_sharing"}
    assert chosen["throughput"] >= {"order", "victims", "step_cut", "pacing", "admission"}
    assert chosen["fair"] >= {"order", "step_cut", "admission"}


def test_each_switch_of_the_section_is_a_rule():
    """A switch without its rule would be in force in no policy, and on no page."""
    switches = {n for n, f in PolicyConfig.model_fields.items() if f.annotation == bool | None}
    assert switches == set(RULES)
    assert set(RULES) < set(PolicyRules.model_fields)


def test_a_rule_is_left_out_of_rules_that_were_asked_before():
    """What is computed once is that of the new rules."""
    rules = choose_rules(PolicyConfig(name="noop", order=True))
    assert not rules.are_all_off
    assert rules.without("order").are_all_off
