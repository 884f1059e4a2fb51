"""Upper confidence bounds of a share, from so many of so many."""

import math

import numpy as np

# Halvings of [0, 1]: to the last bit of a double.
_HALVINGS = 60


def clopper_pearson(hits: int, trials: int, risk: float) -> float:
    """Least upper bound that holds with confidence 1 - ``risk`` (Clopper and Pearson, 1934).

    The p at which a binomial count of at most ``hits`` has probability ``risk``. Exact, so never
    above ``hoeffding``.

    Returns:
        A share, from 0 to 1.
    """
    if hits >= trials:
        return 1.0
    counts = np.arange(hits + 1, dtype=np.float64)
    steps = np.log((trials - counts[:-1]) / (counts[:-1] + 1))
    log_choices = np.concatenate(([0.0], np.cumsum(steps)))
    low, high = hits / trials, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        if share in {low, high}:
            break
        terms = log_choices + counts * math.log(share) + (trials - counts) * math.log1p(-share)
        is_likelier = float(np.logaddexp.reduce(terms)) > math.log(risk)
        low, high = (share, high) if is_likelier else (low, share)
    return high


def hoeffding(hits: int, trials: int, risk: float) -> float:
    """The simpler bound of the code of arXiv:2602.03814 (its "UCB"): mean + sqrt(ln(1/risk)/2n).

    Returns:
        A share; may be above 1.
    """
    return hits / trials + math.sqrt(math.log(1 / risk) / (2 * trials))


def conformal_risk(hits: int, trials: int) -> float:
    """What conformal risk control compares with the tolerance, (hits + 1) / (trials + 1).

    It bounds the loss on the average over calibration sets, with no confidence (Angelopoulos et
    al., arXiv:2208.02814; "CRC" in the code of arXiv:2602.03814).
    """
    return (hits + 1) / (trials + 1)


def trials_needed(tolerance: float, risk: float) -> int:
    """Fewest trials in which no hit at all bounds the share by ``tolerance``."""
    return math.ceil(math.log(risk) / math.log1p(-tolerance))
