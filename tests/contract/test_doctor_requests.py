"""What the doctor's requests rely on in vLLM's server."""

import inspect

from starlette.datastructures import Headers
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.metrics.loggers import PrometheusStatLogger

from meridian_patch.operate.doctor.behaviour import _TO_FIRST_ENGINE
from meridian_patch.operate.scrape import RUNNING


class Request:
    """As Starlette's, as far as headers go."""

    headers = Headers(_TO_FIRST_ENGINE)


def test_a_header_names_the_engine():
    """A prompt that is asked twice is asked of one engine, whose prefix cache it must hit."""
    assert OpenAIServingCompletion._get_data_parallel_rank(Request()) == 0


def test_requests_that_run_are_counted_by_the_logger_of_statistics():
    """Without it, which is what --disable-log-stats means, the page does not have them."""
    assert f'"{RUNNING}"' in inspect.getsource(PrometheusStatLogger)
