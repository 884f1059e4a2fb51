"""Stop strings that count in the answer only, on vLLM's own detokenizers and output processor."""

import random
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine import detokenizer as detokenizers
from vllm.v1.engine import output_processor as upstream
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest

from meridian_patch.config.load import load_config
from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.api import answer_stops, served_model
from meridian_patch.engine.api.exit_summary import check_fields
from meridian_patch.engine.api.input_check import build_input_processor
from meridian_patch.engine.api.request_state import build_request_state
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.matcher import BoundaryMatcher
from meridian_patch.phase.output_phases import OutputPhases

THINK_START, THINK_END, TURN_END = 256, 257, 259
BOUNDARIES = Boundaries("tiny", ((THINK_START,),), ((THINK_END,),), (THINK_END,))
MATCHER = BoundaryMatcher(BOUNDARIES)
TOKENIZER = build_tokenizer()
OPEN, CLOSED = "<|user|>Hi<|assistant|><think>", "<|user|>Hi<|assistant|>"
ANSWER_ONLY = {"meridian_stop_scope": "answer"}


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def request(prompt, name="r", **params):
    settings = {"max_tokens": 500, "skip_special_tokens": False, **params}
    made = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=ids(prompt),
        mm_features=None,
        sampling_params=SamplingParams(**settings),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    made.external_req_id = "r"
    return made


def scoped(prompt, kind="Fast", **params):
    """A detokenizer of vLLM's as this package wraps it."""
    made = getattr(detokenizers, f"{kind}IncrementalDetokenizer")(
        TOKENIZER, request(prompt, **params)
    )
    return answer_stops.build_detokenizer(made, OutputPhases(MATCHER, ids(prompt)))


def feed(detokenizer, tokens, step, *, ends=False):
    """Give tokens in steps until a stop string matches.

    Returns: the stop string, and the text as a stream sends it.
    """
    sent, found = "", None
    for begin in range(0, len(tokens), step):
        is_last = begin + step >= len(tokens)
        found = detokenizer.update(tokens[begin : begin + step], ends and is_last)
        sent += detokenizer.get_next_output_text(found is not None or is_last, True)
        if found is not None:
            break
    return found, sent


@pytest.fixture(params=["Fast", "Slow"])
def kind(request):
    return request.param


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("include", [False, True], ids=["cut", "kept"])
def test_a_stop_string_in_the_thought_does_not_match(kind, step, include):
    """In the answer it does, at the same place for any number of tokens per step."""
    text = "so STOP it</think>then STOP now"
    settings = {"stop": ["STOP"], "include_stop_str_in_output": include}
    found, sent = feed(scoped(OPEN, kind, **settings), ids(text), step)
    assert found == "STOP"
    assert sent == "so STOP it</think>then " + "STOP" * include
    off = getattr(detokenizers, f"{kind}IncrementalDetokenizer")(
        TOKENIZER, request(OPEN, **settings)
    )
    assert feed(off, ids(text), step) == ("STOP", "so " + "STOP" * include)


@pytest.mark.parametrize("step", [1, 4, 100])
@pytest.mark.parametrize("stop", ["STOP", "k>OP", "</think>", "ST</think>OP"])
def test_a_stop_string_across_the_boundary_does_not_match(kind, step, stop):
    """Neither with its first half in the thought nor in the marker's own text."""
    text = "ST</think>OP and on"
    assert feed(scoped(OPEN, kind, stop=[stop]), ids(text), step) == (None, text)


@pytest.mark.parametrize("step", [1, 5, 100])
def test_a_model_that_opens_its_own_thought(kind, step):
    """The opening marker is no answer, a thought behind an answer neither."""
    text = "<think>a.</think>ab<think>b.</think>b."
    for stop in ("<", "a.", "b<"):
        assert feed(scoped(CLOSED, kind, stop=[stop]), ids(text), step) == (None, text)
    found, sent = feed(scoped(CLOSED, kind, stop=["b."]), ids(text), step)
    assert (found, sent) == ("b.", text.removesuffix("b."))


def test_without_a_thought_all_is_answer(kind):
    """As stock, text and ids."""
    tokens = ids("one STOP two")
    stock = getattr(detokenizers, f"{kind}IncrementalDetokenizer")(
        TOKENIZER, request(CLOSED, stop=["STOP"])
    )
    ours = scoped(CLOSED, kind, stop=["STOP"])
    assert feed(ours, tokens, 3) == feed(stock, tokens, 3)
    assert ours.output_token_ids == stock.output_token_ids
    assert ours.num_output_tokens() == stock.num_output_tokens()


@pytest.mark.parametrize("ends", [False, True], ids=["stop string", "stop token"])
def test_a_stop_token_ends_a_step_as_in_stock(kind, ends):
    """The last token of the output is left out of the text, and counted."""
    for text in ("hm<|end|>", "hm</think>", "hm</think>so<|end|>", "<|end|>"):
        ours = scoped(OPEN, kind, stop=["STOP"])
        found, sent = feed(ours, ids(text), 100, ends=ends)
        last = "<|end|>" if text.endswith("<|end|>") else "</think>"
        assert (found, sent) == (None, text.removesuffix(last) if ends else text)
        assert ours.output_token_ids == ids(text)


@pytest.mark.parametrize("seed", range(60))
def test_it_is_stock_on_the_answer_alone(kind, seed):
    """Against stock with prompt and thought as its prompt, over random texts and steps."""
    rng = random.Random(seed)
    thought = "".join(rng.choices("abé \n.", k=rng.randint(0, 12))) + "</think>"
    answer = "".join(rng.choices("abé \n.", k=60))
    stops = ["".join(rng.choices("abé\n", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
    least = rng.choice([0, 0, 30])
    settings = {"stop": stops, "include_stop_str_in_output": rng.random() < 0.5}
    ours = scoped(OPEN, kind, min_tokens=least, **settings)
    stock = getattr(detokenizers, f"{kind}IncrementalDetokenizer")(
        TOKENIZER,
        request(OPEN + thought, min_tokens=max(least - len(ids(thought)), 0), **settings),
    )
    expected = feed(stock, ids(answer), 1)
    found, sent = feed(ours, ids(thought + answer), rng.choice([1, 2, 7, 100]))
    assert (found, sent) == (expected[0], thought + expected[1])
    assert list(ours.output_token_ids) == ids(thought) + list(stock.output_token_ids)


def test_a_thought_is_not_held_back(kind):
    """What may begin a stop string is, and that begins in the answer."""
    ours = scoped(OPEN, kind, stop=["a long stop string"])
    sent = []
    for token in ids("hm</think>ok"):
        ours.update([token], False)
        sent.append(ours.get_next_output_text(False, True))
    assert sent == ["h", "m", "</think>", "", ""]
    assert ours.get_next_output_text(False, False) == "hm</think>"
    assert ours.get_next_output_text(True, True) == "ok"


# The whole way through vLLM's output processor.


@pytest.fixture
def served(monkeypatch):
    """An output processor with our request states, for a model with boundaries."""
    ours = build_request_state(upstream.RequestState)
    monkeypatch.setattr(upstream, "RequestState", ours)

    def build(**env):
        model = served_model.ServedModel(None, load_config(env))
        model.__dict__["matcher"] = MATCHER
        monkeypatch.setattr(served_model, "_SERVED", {TOKENIZER: model})
        return upstream.OutputProcessor(TOKENIZER, log_stats=False)

    return build


def say(processor, name, text, *, ends=False):
    """Let the engine say some text in one step; returns the outputs and the ids to abort."""
    reason = FinishReason.LENGTH if ends else None
    done = processor.process_outputs([EngineCoreOutput(name, ids(text), finish_reason=reason)])
    return [out.outputs[0] for out in done.request_outputs], done.reqs_to_abort


def test_a_request_asks_for_it(served):
    """Drafts bring thought, boundary, stop string and more in one step; the rest is dropped."""
    processor = served()
    processor.add_request(
        request(OPEN, stop=["STOP"], extra_args=ANSWER_ONLY, output_kind=RequestOutputKind.DELTA),
        None,
    )
    [first], _ = say(processor, "r", "a STOP b")
    assert (first.text, first.finish_reason) == ("a STOP b", None)
    [last], aborted = say(processor, "r", "c</think>d STOP e")
    assert (last.text, last.finish_reason, last.stop_reason) == ("c</think>d ", "stop", "STOP")
    assert list(last.token_ids) == ids("c</think>d STOP")
    assert aborted == ["r"]


@pytest.mark.parametrize(
    ("default", "asked", "is_stopped"),
    [
        ("all", None, True),
        ("all", "answer", False),
        ("all", "all", True),
        ("answer", None, False),
        ("answer", "all", True),
        ("answer", "answer", False),
    ],
)
def test_the_request_counts_before_the_configuration(served, default, asked, is_stopped):
    """And stock's way is the default."""
    processor = served(MERIDIAN_PATCH_SET_REQUESTS__STOP_SCOPE=default)
    fields = {"meridian_stop_scope": asked} if asked else None
    processor.add_request(request(OPEN, stop="STOP", extra_args=fields), None)
    [out], _ = say(processor, "r", "a STOP b")
    assert (out.finish_reason == "stop") is is_stopped


def test_each_choice_has_its_own_phases(served):
    """One of two has ended its thought, the other has not."""
    processor = served()
    whole = request(OPEN, n=2, stop=["STOP"], extra_args=ANSWER_ONLY)
    parent = ParentRequest(whole)
    for index in range(2):
        name, params = parent.get_child_info(index)
        child = request(OPEN, name)
        child.sampling_params = params
        processor.add_request(child, None, parent, index)
    [out], _ = say(processor, "0_r", "a</think>STOP")
    assert (out.index, out.stop_reason) == (0, "STOP")
    [out], _ = say(processor, "1_r", "a STOP")
    assert (out.index, out.finish_reason) == (1, None)


def test_a_session_goes_on_in_the_phase_that_the_model_sees(served):
    """The next chunk may open a thought again."""
    processor = served()
    chunk = request(OPEN, stop=["STOP"], extra_args=ANSWER_ONLY)
    chunk.resumable = True
    processor.add_request(chunk, None)
    say(processor, "r", "a</think>b", ends=True)
    more = request("<think>", stop=["STOP"], extra_args=ANSWER_ONLY)
    more.resumable = True
    processor.add_request(more, None)
    [out], _ = say(processor, "r", "STOP")
    assert out.finish_reason is None
    [out], _ = say(processor, "r", "</think>STOP")
    assert out.stop_reason == "STOP"


def test_stock_is_left_alone(served):
    """Without stop strings, without text, and for a model that does not think."""
    processor = served(MERIDIAN_PATCH_SET_REQUESTS__STOP_SCOPE="answer")
    for name, params in {"none": {}, "ids": {"detokenize": False}}.items():
        processor.add_request(request(OPEN, name, **params), None)
    served_model._SERVED[TOKENIZER].__dict__["matcher"] = None
    processor.add_request(request(OPEN, "plain", stop=["STOP"]), None)
    states = processor.request_states.values()
    assert not any(isinstance(each.detokenizer, answer_stops.AnswerStops) for each in states)


class StockProcessor:
    """In place of vLLM's, which wants a model."""

    def __init__(self, vllm_config=None):
        self.vllm_config = vllm_config
        self.renderer = SimpleNamespace(tokenizer=TOKENIZER)

    def process_inputs(self, request_id, prompt, params):
        return request_id


Processor = build_input_processor(StockProcessor)


def test_a_wrong_scope_is_refused():
    """HTTP 400 that names the field."""
    params = SamplingParams(extra_args={"meridian_stop_scope": "thought"})
    with pytest.raises(
        VLLMClientError, match="meridian_stop_scope is 'thought', expected 'all' or"
    ):
        Processor().process_inputs("r", "prompt", params)


def test_boundaries_are_resolved_when_a_request_needs_them(monkeypatch):
    """Not before; and where that fails, the request is told, not the engine's output loop."""

    def fail(*_):
        raise BoundaryError("model x: no such marker")

    monkeypatch.setattr(served_model, "find_resolution", fail)
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(reasoning_parser_plugin="", reasoning_parser="")
    )
    processor = Processor(config)
    for params in (
        SamplingParams(stop="x"),
        SamplingParams(extra_args=ANSWER_ONLY),
        SamplingParams(stop="x", extra_args={"meridian_stop_scope": "all"}),
    ):
        assert processor.process_inputs("r", "prompt", params) == "r"
    with pytest.raises(VLLMClientError, match="meridian_stop_scope: model x: no such marker"):
        processor.process_inputs("r", "p", SamplingParams(stop="x", extra_args=ANSWER_ONLY))
    monkeypatch.setenv("MERIDIAN_PATCH_SET_REQUESTS__STOP_SCOPE", "answer")
    with pytest.raises(BoundaryError):
        Processor(config)


def test_the_real_input_processor_knows_its_model(monkeypatch, demo_model):
    """The output processor finds the model by its tokenizer."""
    config = EngineArgs(model=str(demo_model), max_model_len=256).create_engine_config()
    processor = build_input_processor(InputProcessor)(config)
    monkeypatch.setattr(upstream, "RequestState", build_request_state(upstream.RequestState))
    made = processor.process_inputs(
        "r",
        {"type": "token", "prompt_token_ids": ids(OPEN)},
        SamplingParams(stop=["STOP"], max_tokens=50, extra_args=ANSWER_ONLY),
        ("generate",),
    )
    made.external_req_id = "r"
    outputs = upstream.OutputProcessor(processor.renderer.tokenizer, log_stats=False)
    outputs.add_request(made, None)
    [out], _ = say(outputs, "r", "a STOP")
    assert out.finish_reason is None
    [out], _ = say(outputs, "r", "</think>STOP")
    assert out.stop_reason == "STOP"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so </think>", "is 'so </think>', expected text without the marker '</think>'"),
        ("x" * 65, "expected at most 64 tokens, not 65"),
        ("x" * 501, "at most 500 characters"),
        ("<|end|>", "expected no special token such as '<|end|>'"),
        (7, "meridian_wrap_up is 7, expected a valid string"),
    ],
)
def test_a_wrong_wrap_up_is_refused(demo_model, text, expected):
    """By the served tokenizer and the model's markers; a right one passes."""
    config = EngineArgs(model=str(demo_model), max_model_len=256).create_engine_config()
    served = served_model.ServedModel(config, load_config({}))
    check_fields({"meridian_wrap_up": "Time is up.\n"}, served)
    check_fields({"meridian_wrap_up": ""}, served)
    with pytest.raises(VLLMClientError, match="meridian_wrap_up") as error:
        check_fields({"meridian_wrap_up": text}, served)
    assert expected in str(error.value)
