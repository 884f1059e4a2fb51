"""Where calibration says that a close comes, and where real engines close, to the token."""

import pytest
from engine_plans import PATIENT
from run_engine import PATCHED, Job, clean_environment, run_job
from transformers import AutoTokenizer
from workloads import ask_all, engine_arguments

from meridian_patch.calibrate.engine_process import EngineProcess
from meridian_patch.calibrate.graders import make_grader
from meridian_patch.calibrate.journal import Journal
from meridian_patch.calibrate.observe import Observer, Subject
from meridian_patch.calibrate.problems import Problem
from meridian_patch.calibrate.thresholds import EAT
from meridian_patch.config.schema import ExitConfig
from meridian_patch.demo.problems import make_problems
from meridian_patch.engine.model_directory import read_model
from meridian_patch.exit.lag import Lag
from meridian_patch.exit.text_breaks import find_breaks

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

BLOCK_SIZE, THINK_END, DELTA = 32, 257, 0.05
EXIT = {
    "min_think_tokens": 24,
    "eat_warmup_probes": 3,
    "eat_alpha": 0.5,
    "eat_delta": DELTA,
    "eat_max_entropy_nats": 0.5,
    "probe_min_gap_tokens": 8,
    "probe_max_gap_tokens": 12,
    # With more steps between two with probes the wait is drawn, and no close is foreseen exactly.
    "probe_every_steps": 1,
    "rpdi": False,
}
SETTINGS = {"MERIDIAN_PATCH_SET_EXIT__MODE": "enforce"} | {
    f"MERIDIAN_PATCH_SET_EXIT__{name.upper()}": str(value) for name, value in EXIT.items()
}
PROBLEMS = make_problems(8, seed=7, steps=6)
LAGS = {
    "sync": Lag(1, 1, BLOCK_SIZE, 1),
    "async": Lag(2, 1, BLOCK_SIZE, 1),
}


@pytest.fixture(scope="module")
def calibrated(demo_model, tmp_path_factory):
    """Closes by lag and problem, and what the calibration's engine says of itself."""
    folder = tmp_path_factory.mktemp("calibrated")
    found = read_model(str(demo_model), None, None)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    texts = ((i, tokenizer.decode([i], skip_special_tokens=True)) for i in range(len(tokenizer)))
    subject = Subject(
        boundaries=found.resolution.boundaries,
        breaks=find_breaks(texts),
        config=ExitConfig(**EXIT),
        thresholds={EAT: (DELTA,)},
        max_tokens=500,
        max_answer_tokens=4,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    )
    prompts = []
    for number, problem in enumerate(PROBLEMS):
        messages = ({"role": "user", "content": problem.question},)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append((Problem(str(number), messages, problem.answer, number + 1), ids))
    closes = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clean_environment(folder).items():
            patch.setenv(name, value)
        patch.setenv("MERIDIAN_PATCH_SET_EXIT__PROBE_EVERY_STEPS", "1")
        arguments = engine_arguments(demo_model)
        with (
            Journal(folder / "journal", {}) as journal,
            EngineProcess(arguments, {"temperature": 0}, folder / "log") as engine,
        ):
            for name, lag in [*LAGS.items(), ("own", None)]:
                grader = make_grader("meridian_patch.demo.problems:grade")
                observer = Observer(subject, grader, engine, journal, lambda *_: None, lag)
                naturals = observer.naturals(prompts)
                records = observer.records(naturals)[EAT]
                closes[name] = [
                    record.stops[0].think_tokens if record.stops else len(natural.thought)
                    for natural, record in zip(naturals, records, strict=True)
                ]
            own = observer.lag
    return closes, [len(natural.thought) for natural in naturals], own


@pytest.mark.parametrize("way", ["sync", "async"])
def test_closes_come_where_calibration_says(calibrated, demo_model, tmp_path, way):
    """Synchronous and asynchronous: every thought has the length that was graded."""
    predicted, natural, _ = calibrated
    engine = engine_arguments(demo_model, async_scheduling=way == "async")
    runs = [{"name": "run", "requests": ask_all("r", PROBLEMS, max_tokens=500)}]
    job = Job(
        [{"name": "s", "engine": engine, "runs": runs}],
        env=PATCHED | PATIENT | SETTINGS,
        allow_async=True,
    )
    run = run_job(job, tmp_path)["stages"]["s"]["runs"]["run"]
    samples = [run["outputs"][f"r{number}"]["samples"][0] for number in range(len(PROBLEMS))]
    assert [sample["ids"].index(THINK_END) for sample in samples] == predicted[way]
    assert run["counted"]["exit:eat"] >= len(PROBLEMS) / 2
    assert sum(predicted[way]) < sum(natural)


def test_calibration_takes_the_lag_of_its_engine(calibrated):
    """vLLM's CPU build schedules synchronously, and a server with the same arguments would too."""
    predicted, _, own = calibrated
    assert own == LAGS["sync"]
    assert predicted["own"] == predicted["sync"] != predicted["async"]
