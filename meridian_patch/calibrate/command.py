"""``meridian calibrate``: thresholds of early exit from labelled problems."""

import argparse
from pathlib import Path
from typing import Any


def add_calibrate(commands: Any) -> None:
    """Add ``calibrate`` to the subcommands of the ``meridian`` command."""
    calibrate = commands.add_parser(
        "calibrate",
        help="thresholds of early exit from labelled problems, and what they cost",
        description="Lets a model solve labelled problems, ends each thought where a threshold "
        "would, and chooses the thresholds that save most while the loss is bounded.",
    )
    calibrate.add_argument(
        "--model", required=True, help="model directory, or a name in the Hugging Face cache"
    )
    calibrate.add_argument(
        "--data", type=Path, required=True, help="JSON lines with prompt or messages, and answer"
    )
    calibrate.add_argument(
        "--epsilon", default="0.01", help="share of problems that may be lost (default: 0.01)"
    )
    calibrate.add_argument(
        "--confidence", default="0.95", help="with which no more are (default: 0.95)"
    )
    calibrate.add_argument(
        "--grader",
        default="exact",
        help="exact, numeric, regex:PATTERN, or MODULE:FUNCTION (default: exact)",
    )
    calibrate.add_argument(
        "--strategies", help="eat, rpdi, or both (default: those that the configuration has on)"
    )
    calibrate.add_argument("--eat-deltas", help="thresholds to try (default: 47 from 2^-20 to 2^3)")
    calibrate.add_argument("--rpdi-lambdas", help="thresholds to try (default: 30 from 4 to 1.1)")
    calibrate.add_argument("--temperature", help="of all answers (default: the model's own)")
    calibrate.add_argument("--max-tokens", help="of thought and answer (default: all there is)")
    calibrate.add_argument(
        "--max-answer-tokens", default="2048", help="behind an early close (default: 2048)"
    )
    calibrate.add_argument("--reasoning-parser", help="as given to vLLM")
    calibrate.add_argument("--family", help="take this family file, whatever matches")
    calibrate.add_argument(
        "--template",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template, such as enable_thinking=true",
    )
    calibrate.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vllm.LLM, such as tensor_parallel_size=2; give the server's: how late "
        "a close comes depends on them",
    )
    calibrate.add_argument("--out", type=Path, default=Path("out/calibrate"), help="folder")
    calibrate.set_defaults(run=run_calibrate)


def run_calibrate(parsed: argparse.Namespace) -> int:
    """Calibrate; 130 on Ctrl-C, after which the same command continues.

    Raises:
        MeridianError: a wrong argument, model or data file, or nothing can be calibrated.
    """
    from meridian_patch.calibrate.settings import read_request

    request = read_request(parsed)
    from meridian_patch.bench.interrupts import EXIT_INTERRUPTED, end_like_ctrl_c
    from meridian_patch.calibrate.run import calibrate_model

    end_like_ctrl_c()
    try:
        return calibrate_model(request)
    except KeyboardInterrupt:
        print(f"interrupted; what is done is kept in {request.journal}, the same command continues")
        return EXIT_INTERRUPTED
