"""What the GPU suite reads of vLLM's check for host synchronisations."""

import inspect

import pytest
import vllm.envs
from gpu_suite.checks import SYNC_VARIABLE, SYNC_WORDS, WORDS
from vllm.utils import gpu_sync_debug
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu import model_runner as gpu_model_runner
from vllm.v1.worker.gpu_worker import Worker


def test_variable_and_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    read = vllm.envs.environment_variables[SYNC_VARIABLE]
    monkeypatch.setenv(SYNC_VARIABLE, "error")
    assert read() == "error"
    monkeypatch.setenv(SYNC_VARIABLE, "yes")
    with pytest.raises(ValueError, match=SYNC_VARIABLE):
        read()


def test_words_of_both_errors() -> None:
    """Of synchronising calls and of copies from memory that is not pinned."""
    assert SYNC_WORDS in gpu_sync_debug.SYNC_ERROR_MESSAGE
    assert SYNC_WORDS in gpu_sync_debug.IMPLICIT_SYNC_ERROR_MESSAGE


def test_steps_are_checked() -> None:
    """The worker's steps, where our tap measures."""
    source = inspect.getsource(Worker)
    assert source.count("@with_gpu_sync_check") == 2
    assert "enable_gpu_sync_check()" in source


def test_words_of_the_runner_and_of_graphs() -> None:
    """By these words in a server's log the suite says what is in use."""
    worker, v2_runner = inspect.getsource(gpu_worker), inspect.getsource(gpu_model_runner)
    assert WORDS["the V2 runner"].search(worker)
    assert WORDS["CUDA graphs"].search(v2_runner)
