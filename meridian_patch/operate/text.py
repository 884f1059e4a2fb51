"""Makes text that a server sent fit to print."""


def printable(text: str) -> str:
    """The same with ``?`` for what may steer a terminal: escapes, line ends, other controls."""
    return "".join(each if each.isprintable() else "?" for each in text)
