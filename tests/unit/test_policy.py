"""Who is served first and who is preempted last."""

from typing import get_args

from meridian_patch.config.policy import RULES, PolicyConfig, PolicyName, PolicyRules
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.levels import Levels
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.policy.running_order import LatencyPolicy, RequestView


def view(phase, thought=100, *, tokens=50, handed=True, prefilling=False, prompt=0, priority=0):
    return RequestView(phase, tokens, handed, prefilling, thought, prompt, priority)


def order(**views):
    policy = LatencyPolicy(protected_answer_tokens=16, levels=Levels(512, 0.25))
    return sorted(views, key=lambda name: policy.rank(views[name]))


def test_a_prompt_counts_while_it_waits_and_is_computed_only():
    """A thinker holds what its prompt needs, and would compute it again."""
    short, long = view(Phase.THINK, 600), view(Phase.THINK, 100, prompt=16_000)
    assert order(long=long, short=short) == ["long", "short"]
    short = view(Phase.PREFILL, 0, prefilling=True, prompt=100)
    long = view(Phase.PREFILL, 0, prefilling=True, prompt=16_000)
    assert order(long=long, short=short) == ["short", "long"]


def test_standing_of_all_kinds():
    """Hand-off, answer, resuming answer, thinkers by level, prefill by level."""
    assert order(
        resuming_thinker=view(Phase.THINK, 800, prefilling=True),
        prefill=view(Phase.PREFILL, 0, prefilling=True),
        long_thinker=view(Phase.THINK, 700),
        short_thinker=view(Phase.THINK, 10),
        resuming_answer=view(Phase.ANSWER, prefilling=True),
        answer=view(Phase.ANSWER),
        handoff=view(Phase.ANSWER, tokens=15),
    ) == [
        "handoff",
        "answer",
        "resuming_answer",
        "short_thinker",
        "long_thinker",
        "prefill",
        "resuming_thinker",
    ]


def test_thinkers_of_one_level_keep_the_stock_order():
    """Their exact lengths do not matter, their priorities do."""
    one, other = view(Phase.THINK, 1000), view(Phase.THINK, 600)
    assert order(a=one, b=other) == ["a", "b"]
    assert order(b=other, a=one) == ["b", "a"]
    assert order(a=view(Phase.THINK, 10), b=view(Phase.THINK, 900, priority=-1)) == ["b", "a"]


def test_answers_keep_the_stock_order():
    """Among answers nothing is reordered, whatever they have computed."""
    assert order(a=view(Phase.ANSWER, 5), b=view(Phase.ANSWER, 500)) == ["a", "b"]


def test_plain_answers_have_no_handoff():
    """A request that never thought stands with the answers from its first token."""
    assert order(old=view(Phase.ANSWER), new=view(Phase.ANSWER, tokens=1, handed=False)) == [
        "old",
        "new",
    ]


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
