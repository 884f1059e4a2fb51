"""Settings of the policy for data-parallel ranks that compute each step together."""

from typing import Annotated

from pydantic import Field

Balance = Annotated[
    bool | None,
    Field(
        description="Rule: under data parallelism, prefill leaves room for the answers of all "
        "ranks that compute each step together (mixture of experts), and new requests go to the "
        "rank with the least phase-weighted load."
    ),
]
HoldSteps = Annotated[
    int,
    Field(
        ge=0,
        le=64,
        description="Steps in a row for which a rank may hold new requests back while another "
        "rank has no room left, so that ranks compute prompts in the same step; only with "
        "`balance`. 0: none.",
    ),
]
