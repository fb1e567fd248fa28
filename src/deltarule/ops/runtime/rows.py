"""Names of the rows of a tile, as one constant of kernels."""

from collections import namedtuple

import triton.language as tl


def row_names(names: str) -> tl.constexpr:
    """Numbers of rows by their names, as one constant, which Triton's keys of kernels hold."""
    found = tl.constexpr(namedtuple("Rows", names)(*range(len(names.split()))))
    # Triton looks for names in its value, its keys and its interpreter do in the constant.
    found.__dict__ |= found.value._asdict()
    return found
