"""What a prefix cache that never evicts would have held when each request came."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from meridian_patch.bench.served.client import RequestRecord


def reusable_tokens(records: Iterable[RequestRecord], block_size: int) -> int | None:
    """Prompt tokens of all requests that the server had computed before, in whole blocks.

    A prompt is computed when its first token comes, an output when its last one does.

    Args:
        records: of one run that began with an empty cache.
        block_size: tokens per block of the server's cache.

    Returns:
        None where the server did not tell its prompts.
    """
    came = sorted(records, key=lambda record: record.submit_s)
    if not any(record.prompt_ids for record in came):
        return None
    computed = sorted(
        (at_s, number, ids)
        for number, record in enumerate(came)
        if record.token_s
        for at_s, ids in (
            (record.token_s[0], record.prompt_ids),
            # The last token is sampled and not computed.
            (record.token_s[-1], record.prompt_ids + record.token_ids[:-1]),
        )
    )
    held: set[int] = set()
    done, found = 0, 0
    for record in came:
        while done < len(computed) and computed[done][0] <= record.submit_s:
            held.update(_blocks(computed[done][2], block_size))
            done += 1
        # Load-bearing: the last token of a prompt is always computed, to sample from it.
        for block in _blocks(record.prompt_ids[:-1], block_size):
            if block not in held:
                break
            found += block_size
    return found


def _blocks(ids: Sequence[int], block_size: int) -> Iterator[int]:
    """A number for each whole block, which stands for all tokens up to its end."""
    chain = 0
    for start in count(0, block_size):
        if start + block_size > len(ids):
            return
        chain = hash((chain, *ids[start : start + block_size]))
        yield chain
