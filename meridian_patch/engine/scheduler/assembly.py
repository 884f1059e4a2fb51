"""Builds the parts of a phase-aware scheduler from its configuration, and reports them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from meridian_patch.config.load import process_config
from meridian_patch.config.policy import PolicyConfig, PolicyName, PolicyRules
from meridian_patch.engine import front_end, status
from meridian_patch.engine.boundaries import resolve_boundaries, vocabulary_of
from meridian_patch.engine.early_exit.binding import build_early_exit
from meridian_patch.engine.early_exit.part import EarlyExit
from meridian_patch.engine.early_exit.probes import Probes
from meridian_patch.engine.early_exit.report import NoEarlyExit
from meridian_patch.engine.handoff.binding import build_handoff
from meridian_patch.engine.handoff.think_part import ThinkPart
from meridian_patch.engine.kv_cache.tiers import KVTiers, build_kv_tiers
from meridian_patch.engine.scheduler import rank_exchange
from meridian_patch.engine.scheduler.attained_service import AttainedService, StockSteps
from meridian_patch.engine.scheduler.balance_part import BalancePart
from meridian_patch.engine.scheduler.displacing import Displacing
from meridian_patch.engine.scheduler.guard import StepGuard
from meridian_patch.engine.scheduler.indivisible_chunks import IndivisibleChunks
from meridian_patch.engine.scheduler.kv_units import pool_tokens
from meridian_patch.engine.scheduler.level_review import LevelReview
from meridian_patch.engine.scheduler.metrics_part import MetricsPart, build_metrics
from meridian_patch.engine.scheduler.options_parser import OptionsParser
from meridian_patch.engine.scheduler.parts import Parts, SchedulerPart
from meridian_patch.engine.scheduler.phase_part import PhasePart
from meridian_patch.engine.scheduler.policy_part import PolicyPart
from meridian_patch.engine.scheduler.queue_part import QueuePart
from meridian_patch.engine.scheduler.rank_agreement import decide_alike
from meridian_patch.engine.scheduler.rank_exchange import Exchange
from meridian_patch.engine.scheduler.refusals import Refusals
from meridian_patch.engine.scheduler.running_order import OrderPart, RunningOrder
from meridian_patch.engine.scheduler.step_cut import StepCut
from meridian_patch.engine.scheduler.step_load import StepLoad
from meridian_patch.engine.scheduler.step_timer import graph_tokens
from meridian_patch.engine.scheduler.step_timing import StepTiming
from meridian_patch.engine.scheduler.waiting_order import WaitingOrder
from meridian_patch.exit.actions import Obstacle
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.phase.sequences import Vocabulary
from meridian_patch.phase.tracker import PhaseTracker
from meridian_patch.policy.levels import Levels
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.policy.running_order import LatencyPolicy
from meridian_patch.policy.step_time import StepTimeModel
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

logger = init_logger("vllm.meridian_patch")


class Policy(NamedTuple):
    """The policy: its parts as they are called, and objects that several of them use.

    Attributes:
        rules: the rules that are on.
        first: finds out whether requests compete for a step; the others act only then.
        queue: places requests in the waiting queue.
        cut: lowers the token budget; before room is made, as prompts take blocks by it.
        review: decides which levels count.
        displacing: preempts thinkers; None without the rule ``time_sharing``.
        order: orders the running requests, behind all preemptions.
        timing: learns the time of steps.
        load: counts the tokens of steps.
        chunks: which pieces of prompts a lowered token budget must not divide.
        refusals: what upstream refuses while it admits requests.
        waiting_order: places requests in the queue.
        stock_steps: when all is done as in stock.
        levels: learn from all thoughts.
        model: predicts the time of steps.
    """

    rules: PolicyRules
    first: PolicyPart
    queue: QueuePart
    cut: StepCut
    review: LevelReview
    displacing: Displacing | None
    order: OrderPart
    timing: StepTiming
    load: StepLoad
    chunks: IndivisibleChunks
    refusals: Refusals
    waiting_order: WaitingOrder
    stock_steps: StockSteps
    levels: Levels
    model: StepTimeModel

    def parts(self) -> list[SchedulerPart]:
        """The parts that act; without rules nothing is arranged."""
        if self.rules.are_all_off:
            return [self.first, self.timing]
        displacing = [self.displacing] if self.displacing else []
        return [
            self.first, self.queue, self.cut, self.review, *displacing, self.order, self.timing,
        ]  # fmt: skip


class Assembly(NamedTuple):
    """The components of a phase-aware scheduler.

    Attributes:
        parts: all parts, whose hooks the scheduler calls.
        tracker: phases of all requests.
        phase_part: keeps the tracker up to date.
        policy: the policy's parts, and what they share.
        kv_tiers: None if the KV cache has no tiers.
        early_exit: None if the engine has no early exit.
        options_parser: parses the fields of a request.
        think_part: None unless requests may leave the engine after their thought.
        metrics: None unless this process exports metrics itself.
        started_as: the policy whose rules are on, also those of a ``noop`` with rules of its own.
    """

    parts: Parts
    tracker: PhaseTracker
    phase_part: PhasePart
    policy: Policy
    kv_tiers: KVTiers | None
    early_exit: EarlyExit | None
    options_parser: OptionsParser
    think_part: ThinkPart | None
    metrics: MetricsPart | None
    started_as: PolicyName


def assemble(
    scheduler: "PhaseScheduling",
    guard: StepGuard,
    counters: PhaseCounters,
    on_phase_changed: Callable[[str], None],
    end_turn: Callable[[Any], None],
) -> Assembly:
    """Build the parts of a scheduler that upstream has just initialized.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the served model.
    """
    # What an earlier engine of this process could not have, or lost.
    status.publish(kv_tiers_off=None, rules_off={}, parts_off=[], exit_signals=None, probes=None)
    loaded = process_config()
    config, limited_by = decide_alike(loaded.config, scheduler.vllm_config)
    boundaries = resolve_boundaries(scheduler.vllm_config, loaded)
    tracker = PhaseTracker(boundaries, config.policy.protected_answer_tokens)
    rules, exchange = _rules_of(scheduler, config.policy)
    balance = BalancePart(scheduler, exchange, tracker) if exchange else None
    kv_tiers = build_kv_tiers(config, boundaries, tracker, guard, counters, scheduler)
    obstacle = Obstacle.NO_BOUNDARY if boundaries is None else None
    obstacle = Obstacle.EXTERNAL_LAUNCHER if limited_by else obstacle
    model_config = scheduler.vllm_config.model_config
    patterns = PatternTokens(lambda: _vocabulary(model_config), model_config.get_vocab_size())
    early_exit: EarlyExit | None = None
    if not obstacle:
        early_exit = build_early_exit(scheduler, config, boundaries, tracker, counters, patterns)
    probes = early_exit.probes if early_exit else None
    policy = _build_policy(scheduler, config.policy, rules, tracker, probes, counters)
    # A request that asks for early exit gets a report where there is none.
    exit_part = NoEarlyExit(config.exit, obstacle) if obstacle else early_exit
    phase_part = PhasePart(tracker, scheduler.request_states, guard, on_phase_changed, end_turn)
    handoff = build_handoff(scheduler, config.handoff, tracker)
    metrics = build_metrics(scheduler, config.metrics, lambda: phase_part.last_changes)
    parts: list[SchedulerPart | None] = [phase_part, metrics, balance, *policy.parts()]
    parts += [kv_tiers, exit_part, handoff]
    started_as: PolicyName = "noop" if rules.are_all_off else "latency"
    facts = {
        "scheduler": type(scheduler).__name__,
        "scheduler_base": type(scheduler).__mro__[2].__name__,
        "policy": started_as,
        "rules": rules.names_on,
        "config_digest": loaded.digest,
        "model": model_config.served_model_name,
        # Load-bearing: vLLM gives each rank of a dense model the rank 0, and keeps its index.
        "data_parallel_index": scheduler.vllm_config.parallel_config.data_parallel_index,
        "family": boundaries.family if boundaries else None,
        "boundaries": boundaries and {"start": boundaries.start, "end": boundaries.end},
        "kv_tiers": kv_tiers.history if kv_tiers else "off",
        "exit": early_exit.config.mode if early_exit else "off",
        "handoff": config.handoff.role,
        "graph_tokens": policy.model.graph_tokens,
        "limited_by": limited_by,
        "front_end": front_end.name(),
    }
    status.publish(role="engine_core", **facts)
    logger.info("meridian_patch live in EngineCore: %s", facts)
    if front_end.is_rust():
        logger.warning("meridian_patch: vLLM's front end is the one in Rust: %s", front_end.MISSING)
    return Assembly(
        Parts([part for part in parts if part is not None], guard),
        tracker,
        phase_part,
        policy,
        kv_tiers,
        early_exit,
        OptionsParser(config.requests, counters, patterns if early_exit else None),
        handoff if isinstance(handoff, ThinkPart) else None,
        metrics,
        started_as,
    )


def _vocabulary(model_config: Any) -> Vocabulary:
    # The tokenizer was loaded for the boundaries, and is cached.
    tokenizer = cached_tokenizer_from_config(model_config)
    return vocabulary_of(tokenizer, str(model_config.model))


def _build_policy(
    scheduler: "PhaseScheduling",
    config: PolicyConfig,
    rules: PolicyRules,
    tracker: PhaseTracker,
    probes: Probes | None,
    counters: PhaseCounters,
) -> Policy:
    states, levels, model = scheduler.request_states, Levels.of_config(config), StepTimeModel()
    model.graph_tokens = graph_tokens(scheduler.vllm_config)
    live_probes = {} if probes is None else probes.live
    load = StepLoad(scheduler, states, live_probes, pool_tokens(scheduler))
    chunks = IndivisibleChunks(scheduler, states)
    refusals = Refusals(is_on=bool(rules.time_sharing))
    waiting_order = WaitingOrder(states, config.aging_s)
    stock_steps = StockSteps(tracker, states)
    service = AttainedService(states, tracker, levels, config.aging_s)
    ranks = LatencyPolicy(config.protected_answer_tokens, levels)
    order = RunningOrder(ranks, tracker, config.time_budget_us)
    displacing = None
    if rules.time_sharing:
        displacing = Displacing(scheduler, states, tracker, waiting_order, service, refusals, load)
    return Policy(
        rules,
        PolicyPart(
            scheduler,
            rules,
            states,
            tracker,
            stock_steps,
            load,
            order,
            refusals,
            probes,
            model,
            counters,
        ),
        QueuePart(scheduler, rules, states, stock_steps, waiting_order, service),
        StepCut(scheduler, rules, config, states, tracker, load, chunks, model, counters),
        LevelReview(scheduler, states, levels, tracker, is_reviewing=bool(rules.time_sharing)),
        displacing,
        OrderPart(scheduler, order, config.time_budget_us, counters, is_on=bool(rules.order)),
        StepTiming(scheduler, model, counters),
        load,
        chunks,
        refusals,
        waiting_order,
        stock_steps,
        levels,
        model,
    )


def _rules_of(scheduler: "Scheduler", config: PolicyConfig) -> tuple[PolicyRules, Exchange | None]:
    """The rules that this engine can follow, and where it meets the ranks to balance with."""
    rules, exchange = choose_rules(config), None
    off = {}
    if rules.balance:
        joined = rank_exchange.join_ranks(scheduler.vllm_config)
        if isinstance(joined, str):
            off["balance"] = joined
        elif joined is not None:
            exchange = joined
        if exchange is None:
            rules = rules.without("balance")
    if rules.time_sharing and scheduler.policy == SchedulingPolicy.PRIORITY:
        # The operator's priorities alone decide then which request is preempted for another.
        rules = rules.without("time_sharing")
        off["time_sharing"] = "vLLM schedules by the operator's priorities"
    if off:
        status.publish(rules_off=off)
    return rules, exchange
