"""How much later a request may get its first answer token than from stock."""

from simulator.engine import Arm
from simulator.failure import Failure

# So many times stock's time to the first answer token, and so many seconds more.
MOST_TIMES, MORE_S = 3.0, 60.0


def check_delays(stock: Arm, ours: Arm) -> None:
    """Invariant 4: nobody pays for the others without bound.

    Sessions are left out, whose chunks come when they come, and requests that ended otherwise.
    """
    for name, own in ours.ledger.records.items():
        theirs = stock.ledger.records.get(name)
        if theirs is None or own.ask.session is not None or own.finish != theirs.finish:
            continue
        if own.answered_s is None or theirs.answered_s is None:
            continue
        own_s, stock_s = own.answered_s - own.arrived_s, theirs.answered_s - theirs.arrived_s
        if own_s > MOST_TIMES * stock_s + MORE_S:
            raise Failure(
                "delay",
                f"{name} gets its first answer token after {own_s:.1f} s, from stock after "
                f"{stock_s:.1f} s",
            )
