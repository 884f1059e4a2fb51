"""Whether the process that gets the scheduler's outputs takes our data out of them."""

from typing import Any

from meridian_patch.engine import front_end
from meridian_patch.patching.candidate import MARK


def takes_out(cls: Any) -> bool:
    """Whether our data may travel in ``kv_transfer_params``: ``cls`` would take it out of there.

    Otherwise callers would find it there: of a class that is not patched, and of vLLM's front end
    in Rust, which has no such class.
    """
    return hasattr(cls, MARK) and not front_end.is_rust()
