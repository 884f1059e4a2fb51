"""Closes that say a sentence before the end marker, on vLLM's own scheduler."""

import pytest
import yaml
from exit_driver import add_drafts, exit_driver, force_first_rows, is_empty, thinker
from scheduler_driver import THINK_END, TURN_END, WORD
from tier_driver import preempt
from vllm.tokenizers import cached_tokenizer_from_config

from meridian_patch.engine.boundaries import vocabulary_of
from meridian_patch.errors import ConfigError

CAP = 40
CAPPED = {"EXIT__MAX_THINK_TOKENS": str(CAP), "EXIT__EAT": "false", "EXIT__RPDI": "false"}
TEXT = "So, stop.\n"
# The tiny reasoner's tokenizer has a token per byte.
WRAPPED = CAPPED | {"EXIT__WRAP_UP": '"So, stop.\\n"'}
UNDOCUMENTED = {"provenance": "unverified", "source": "a test", "single_token": False}


def vocabulary(driver):
    model_config = driver.scheduler.vllm_config.model_config
    return vocabulary_of(cached_tokenizer_from_config(model_config), "tiny")


def ids(driver, text=TEXT):
    return vocabulary(driver).encode(text)


def drive(driver, *, extra_args=None, max_tokens=200, then=lambda request: None):
    """What a request says that thinks for long; ``then`` changes it before it runs."""
    driver.add(thinker("r", 400, max_tokens=max_tokens), extra_args=extra_args)
    request = driver.scheduler.requests["r"]
    then(request)
    driver.drain()
    assert is_empty(driver)
    return list(request._output_token_ids)


def left_out(driver):
    """Reason -> number of closes without their wrap-up."""
    totals = driver.scheduler.phase_counters.totals
    event = "wrap_up_left_out:"
    return {name.removeprefix(event): n for name, n in totals.items() if name.startswith(event)}


def thought_of(said):
    return said[: said.index(THINK_END)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_the_sentence_stands_before_the_end_marker(monkeypatch, demo_model, is_async, drafts):
    """Whole, once, and the answer begins right behind the marker."""
    if drafts:
        add_drafts(monkeypatch)
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **WRAPPED)
    if drafts:
        force_first_rows(driver)
    expected = ids(driver)
    said = drive(driver)
    assert driver.forced == [("r", token) for token in (*expected, THINK_END)]
    assert thought_of(said)[-len(expected) :] == expected
    assert CAP <= len(thought_of(said)) - len(expected) <= CAP + 1 + is_async + 3 * drafts
    assert WORD in said[said.index(THINK_END) + 1 :]
    assert left_out(driver) == {}
    assert driver.scheduler.phase_counters.totals["exit:hard_cap"] == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_close_of_a_family_comes_behind_it(monkeypatch, demo_model, use_family, is_async):
    """A marker of several tokens, and nothing behind it."""
    use_family(end="</done>", probe=None, documented_ids=UNDOCUMENTED, exit={"wrap_up": TEXT})
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **CAPPED)
    drive(driver)
    expected = (*ids(driver), *driver.scheduler.early_exit.forced_closes.sequence)
    assert [token for _, token in driver.forced] == list(expected)


@pytest.mark.parametrize(
    ("family", "configured", "asked", "said"),
    [
        (TEXT, None, None, TEXT),
        (TEXT, '"ours"', None, "ours"),
        (TEXT, '""', None, ""),
        (TEXT, '"ours"', "theirs", "theirs"),
        ("", None, "theirs", "theirs"),
        (TEXT, None, "", ""),
        ("", None, None, ""),
    ],
)
def test_request_then_configuration_then_family(
    monkeypatch, demo_model, use_family, family, configured, asked, said
):
    """The first that says something counts, and an empty text says: none."""
    use_family(exit={"wrap_up": family} if family else {})
    more = {} if configured is None else {"EXIT__WRAP_UP": configured}
    driver = exit_driver(monkeypatch, demo_model, **CAPPED, **more)
    drive(driver, extra_args=None if asked is None else {"meridian_wrap_up": asked})
    assert [token for _, token in driver.forced] == [*ids(driver, said), THINK_END]


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_it_does_nothing_where_nothing_is_closed(monkeypatch, demo_model, mode):
    driver = exit_driver(monkeypatch, demo_model, **WRAPPED, EXIT__MODE=mode)
    said = drive(driver, max_tokens=600)
    assert not driver.forced
    assert len(thought_of(said)) == 400


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize("spare", [0, 1])
def test_it_is_left_out_if_no_answer_fits_behind_it(
    monkeypatch, demo_model, is_async, limit, spare
):
    """The bare marker leaves more room. With room for one token of an answer it is said."""
    prompt_tokens = 40
    # Under asynchronous scheduling a token was on its way when the close was decided.
    length = CAP + is_async + len(TEXT) + 1 + spare
    is_model = limit == "max_model_len"
    more = {"engine_args": {"max_model_len": prompt_tokens + length}} if is_model else {}
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **WRAPPED, **more)
    said = drive(driver, max_tokens=1500 if is_model else length)
    forced = [token for _, token in driver.forced]
    assert forced == [*(ids(driver) if spare else []), THINK_END]
    assert left_out(driver) == ({} if spare else {"room": 1})
    assert said.index(THINK_END) < len(said) - 1


def set_sampling(**values):
    def change(request):
        for name, value in values.items():
            setattr(request.sampling_params, name, value)

    return change


COMMA = ord(",") - ord("!")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stop": ["stop"]}, "stop"),
        ({"stop": ["never", "\nSo"]}, "stop"),
        ({"stop": ["stop.\n</think>"]}, "stop"),
        ({"_all_stop_token_ids": {TURN_END, COMMA}}, "stop"),
        ({"allowed_token_ids": [WORD, THINK_END, TURN_END]}, "undone"),
        ({"_bad_words_token_ids": [[WORD, COMMA]]}, "undone"),
    ],
    ids=["stop string", "its end", "its beginning", "stop token", "allowed tokens", "bad word"],
)
def test_it_is_left_out_where_it_would_do_harm(monkeypatch, demo_model, change, why):
    """It would end the request, or be undone: the bare marker is forced, and it is counted."""
    driver = exit_driver(monkeypatch, demo_model, **WRAPPED)
    assert COMMA in ids(driver)
    drive(driver, then=set_sampling(**change))
    assert [token for _, token in driver.forced] == [THINK_END]
    totals = driver.scheduler.phase_counters.totals
    assert not any(key.startswith("exit_given_up") for key in totals)
    assert left_out(driver) == {why: 1}


def test_a_stop_string_of_the_answer_does_not_matter(monkeypatch, demo_model):
    """Of a request whose stop strings count in the answer only."""
    driver = exit_driver(monkeypatch, demo_model, **WRAPPED)
    drive(
        driver,
        extra_args={"meridian_stop_scope": "answer"},
        then=set_sampling(stop=["stop"]),
    )
    assert [token for _, token in driver.forced] == [*ids(driver), THINK_END]


@pytest.mark.parametrize(("left", "is_said"), [(len(TEXT) + 3, False), (len(TEXT) + 4, True)])
def test_the_budget_of_vllm_is_not_run_into(monkeypatch, demo_model, left, is_said):
    """It would force its own close in the middle of the sentence, or behind ours."""
    driver = exit_driver(monkeypatch, demo_model, **WRAPPED)
    drive(driver, then=set_sampling(thinking_token_budget=CAP + left))
    assert [token for _, token in driver.forced] == [*(ids(driver) if is_said else []), THINK_END]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("steps", [1, 4, len(TEXT)])
def test_a_preemption_repeats_nothing(monkeypatch, demo_model, is_async, drafts, steps):
    """In the middle of the sentence, and right before the marker."""
    if drafts:
        add_drafts(monkeypatch)
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **WRAPPED)
    if drafts:
        force_first_rows(driver)
    driver.add(thinker("r", 400, max_tokens=200))
    request = driver.scheduler.requests["r"]
    while not driver.scheduler.early_exit.requests["r"].has_close_begun:
        driver.step()
    for _ in range(steps):
        driver.step()
    preempt(driver, "r")
    driver.drain()
    assert is_empty(driver)
    thought = thought_of(request._output_token_ids)
    assert thought[-len(TEXT) :] == ids(driver)
    assert ids(driver, "S")[0] not in thought[: -len(TEXT)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_close_that_begins_anew_is_bare(monkeypatch, demo_model, is_async):
    """Behind half of a sentence, and a token that was not forced."""
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **WRAPPED)
    driver.add(thinker("r", 400, max_tokens=200))
    request = driver.scheduler.requests["r"]
    while not driver.scheduler.early_exit.requests["r"].has_close_begun:
        driver.step()
    driver.step()
    force, driver._force = driver._force, lambda output, result: result
    driver.step()
    driver._force = force
    driver.drain()
    assert is_empty(driver)
    assert thought_of(request._output_token_ids).count(ids(driver, "S")[0]) == 1
    assert request._output_token_ids.count(THINK_END) == 1
    assert left_out(driver) == {"restart": 1}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_abort_in_the_middle_leaves_nothing(monkeypatch, demo_model, is_async):
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **WRAPPED)
    driver.add(thinker("r", 400))
    while len(driver.forced) < 4:
        driver.step()
    driver.abort("r")
    driver.drain()
    assert is_empty(driver)


def test_a_second_thought_has_its_own(monkeypatch, demo_model):
    """Each close says it."""
    driver = exit_driver(monkeypatch, demo_model, **WRAPPED)
    job = thinker("r", 400, max_tokens=300)
    object.__setattr__(job, "opening", ())
    driver.add(job)
    request = driver.scheduler.requests["r"]
    while THINK_END not in request._output_token_ids:
        driver.step()
    force, driver._force = driver._force, lambda output, result: result
    run, driver._run = driver._run, None

    def open_again(output):
        result = run(output)
        result.sampled_token_ids[result.req_id_to_index["r"]] = [256]
        driver._run = run
        return result

    driver._run = open_again
    driver.step()
    driver._force = force
    driver.drain()
    assert [token for _, token in driver.forced] == [*ids(driver), THINK_END] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so </think> it is", "without the marker '</think>'"),
        ("so <think>", "without the marker '<think>'"),
        ("bye<|end|>", "no special token such as '<|end|>'"),
        ("x" * 65, "at most 64 tokens, not 65"),
        ("x" * 501, "at most 500 characters"),
    ],
)
@pytest.mark.parametrize("place", ["configuration", "family"])
def test_a_wrong_text_is_refused_at_the_start(
    monkeypatch, demo_model, use_family, tmp_path, place, text, expected
):
    """The message names the field and its file."""
    if place == "family":
        use_family(exit={"wrap_up": text})
        more, origin = CAPPED, str(tmp_path / "tiny_reasoner.yaml")
    else:
        more, origin = CAPPED | {"EXIT__WRAP_UP": yaml.safe_dump(text, width=1000)}, ""
    with pytest.raises(ConfigError, match=r"exit\.wrap_up is ") as error:
        exit_driver(monkeypatch, demo_model, **more)
    assert expected in str(error.value)
    assert origin in str(error.value)


def test_a_wrong_text_of_a_request_past_the_api_server_is_left_out(monkeypatch, demo_model):
    driver = exit_driver(monkeypatch, demo_model, **WRAPPED)
    drive(driver, extra_args={"meridian_wrap_up": "no </think>"})
    assert [token for _, token in driver.forced] == [THINK_END]
    assert left_out(driver) == {"text": 1}
