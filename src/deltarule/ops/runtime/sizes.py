"""Sizes of grids and tiles in plain Python: Triton's own functions take microseconds a call."""


def cdiv(x: int, y: int) -> int:
    """The least whole number that is not below x / y."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    return 1 << (x - 1).bit_length() if x > 0 else 0
