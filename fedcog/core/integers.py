"""Integer arithmetic that torch and Python leave out."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Divide and round up.

    Args:
        dividend: Any integer.
        divisor: A positive integer.

    Returns:
        The smallest integer that is at least `dividend / divisor`.
    """
    return -(-dividend // divisor)


def round_half_up(number: float) -> int:
    """Round a non-negative number to the nearest integer; a half rounds up.

    Python's `round` rounds halves to even, so 0.5 of a client would be none.
    """
    return int(number + 0.5)
