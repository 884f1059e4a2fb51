"""Clients that keep the thoughts of earlier turns find them in the cache as in stock."""

from dataclasses import replace

import pytest
from scheduler_driver import BLOCK_SIZE, Job
from tier_driver import ASYNC_AND_NIGHTLY_SYNC, THINKER, driver_for, prompt, tiers_of, turn

from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.policy.retention import Tier

pytestmark = pytest.mark.usefixtures("patience")

TOOL_CALL = "<tool>"
TOOL_CALL_IDS = tuple(build_tokenizer().encode(TOOL_CALL, add_special_tokens=False))
SESSIONS, AT_A_TIME, TURNS, BLOCKS = 12, 3, 5, 60
THINK, ANSWER = 70, 30


@pytest.fixture(autouse=True)
def family(use_family, monkeypatch):
    use_family(tool_call=[TOOL_CALL])
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__HISTORY", "keep_in_tool_loop")


def said_by(job):
    return tuple(job.token(index) for index in range(job.think_tokens + 1 + job.answer_tokens + 1))


def first_turn(session):
    return Job(f"s{session}t0", prompt(75, session, thinks=True), THINK, ANSWER)


def next_turn(job, number, *, keeps):
    """The prompt of the turn before, what it said, and words of the user."""
    session = job.request_id.partition("t")[0]
    said = said_by(job)
    # Without its thought an answer stands where the thought began, behind an empty one.
    said = said if keeps else said[job.think_tokens + 1 :]
    begin = job.prompt if keeps else job.prompt[:-1]
    user = prompt(20, 1000 + 50 * number + int(session[1:]), thinks=True)
    return replace(job, request_id=f"{session}t{number}", prompt=(*begin, *said, *user))


def play(driver, *, keeps, fields=None):
    """Three sessions at a time take turns, and do not come back; the prompt tokens found."""
    for first in range(0, SESSIONS, AT_A_TIME):
        jobs = [first_turn(session) for session in range(first, first + AT_A_TIME)]
        for number in range(TURNS):
            if number:
                jobs = [next_turn(job, number, keeps=keeps) for job in jobs]
            for job in jobs:
                driver.add(job, fields)
                driver.drain()
    return driver.hits


def hits(monkeypatch, demo_model, *, is_async, keeps=True, fields=None, tiers=True):
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__TIERS", str(tiers).lower())
    driver = driver_for(demo_model, is_async=is_async, blocks=BLOCKS)
    return play(driver, keeps=keeps, fields=fields)


@ASYNC_AND_NIGHTLY_SYNC
def test_a_client_that_says_so_hits_as_in_stock(monkeypatch, demo_model, is_async):
    """The same requests without the tiers, to the token."""
    arm = {"is_async": is_async}
    told = hits(monkeypatch, demo_model, **arm, fields={"meridian_history": "keep"})
    assert told == hits(monkeypatch, demo_model, **arm, tiers=False) > 0


@ASYNC_AND_NIGHTLY_SYNC
def test_what_prompts_keep_is_learnt(monkeypatch, demo_model, is_async):
    """From the second turn of the first session on: as in stock, where it was an eighth less."""
    learnt = hits(monkeypatch, demo_model, is_async=is_async)
    stock = hits(monkeypatch, demo_model, is_async=is_async, tiers=False)
    assert learnt == stock > 0


@ASYNC_AND_NIGHTLY_SYNC
def test_clients_that_drop_thoughts_are_still_known(monkeypatch, demo_model, is_async):
    """Their thoughts make room as by the family's rule."""
    drop = {"is_async": is_async, "keeps": False}
    learnt = hits(monkeypatch, demo_model, **drop)
    told = hits(monkeypatch, demo_model, **drop, fields={"meridian_history": "keep_in_tool_loop"})
    assert learnt == told >= hits(monkeypatch, demo_model, **drop, tiers=False) > 0


def test_both_kinds_at_once(demo_model):
    """The second turn of each session shows which it is, whatever the others are."""
    driver = driver_for(demo_model, blocks=200)
    # Both have shown their kind once, so that requests of which nothing is known would be kept.
    for session, keeps in ((1, True), (2, False)):
        job = first_turn(session)
        turn(driver, job)
        turn(driver, next_turn(job, 1, keeps=keeps))
    before = len(tiers_of(driver)[Tier.THINK_COMPLETE])
    assert driver.scheduler.kv_tiers._evidence.keeps
    jobs = {session: first_turn(session) for session in (3, 4)}
    for job in jobs.values():
        turn(driver, job)
    assert len(tiers_of(driver)[Tier.THINK_COMPLETE]) == before
    turn(driver, next_turn(jobs[3], 1, keeps=True))
    assert len(tiers_of(driver)[Tier.THINK_COMPLETE]) == before
    turn(driver, next_turn(jobs[4], 1, keeps=False))
    assert len(tiers_of(driver)[Tier.THINK_COMPLETE]) > before


def test_a_tool_loop_is_no_evidence(demo_model):
    """Its next prompt holds its thought under the family's rule, too."""
    driver = driver_for(demo_model, blocks=200)
    job = replace(first_turn(1), opening=TOOL_CALL_IDS)
    turn(driver, job)
    turn(driver, replace(next_turn(job, 1, keeps=True), opening=()))
    assert not driver.scheduler.kv_tiers._evidence.keeps
    assert tiers_of(driver)[Tier.THINK_COMPLETE]


def test_nothing_is_left_of_a_request(demo_model):
    """Its rule is forgotten when it ends, or is aborted."""
    driver = driver_for(demo_model, blocks=200)
    driver.add(THINKER, {"meridian_history": "keep"})
    driver.step()
    assert driver.scheduler.request_states.get("thinker").history == "keep"
    driver.abort("thinker")
    driver.drain()
    assert driver.scheduler.request_states.get("thinker") is None


@pytest.mark.parametrize("is_told", [False, True])
def test_tiers_that_are_off_stay_off(monkeypatch, demo_model, is_told):
    """Whatever a request says."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__TIERS", "false")
    driver = driver_for(demo_model, blocks=200)
    driver.add(first_turn(1), {"meridian_history": "strip"} if is_told else None)
    driver.drain()
    assert not tiers_of(driver)[Tier.THINK_COMPLETE]
    assert len(tiers_of(driver)[Tier.OUTPUT_CRITICAL]) * BLOCK_SIZE > THINK
