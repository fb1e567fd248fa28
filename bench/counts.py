"""The floor of a case: the bytes that must move and the products that must be done, from shapes.

floor = max(bytes / bandwidth, operations / matrix rate)

Bytes: every input is read once and every output is written once. Nothing in between has to pass
through memory, so nothing in between counts. Operations: the matrix products of the chunked form,
2 for each multiply and add, at chunks of 64 rows, which Hopper's matrix instructions take: smaller
chunks need fewer operations, but not at this rate. Each value head counts for itself, triangular
products count whole, and the inverse inside a chunk, a hundredth of the rest, not at all.
"""

from typing import NamedTuple

from torch._subclasses import FakeTensorMode

from bench.cases import OPERATIONS, Operation, Shape, draw

# Measured on an H200: a large copy, bytes read and written; a large bfloat16 matrix product.
BYTES_PER_SECOND = 4.25e12
OPERATIONS_PER_SECOND = 790e12

CHUNK = 64
HALF, SINGLE = 2, 4


class Count(NamedTuple):
    """What a pass has to do at the least."""

    bytes: int
    operations: int

    @property
    def floor_ms(self) -> float:
        """Milliseconds that an H200 needs for it at its measured rates."""
        seconds = max(self.bytes / BYTES_PER_SECOND, self.operations / OPERATIONS_PER_SECOND)
        return seconds * 1e3


class Products(NamedTuple):
    """Multiply-adds of one row (a token, or one of its steps) and value head, in units:

    kv  K * V   a product with the state
    ck  C * K   a product of two blocks of keys or queries, or of scores with one
    cv  C * V   the same with values
    """

    kv: int
    ck: int
    cv: int

    def per_row(self, shape: Shape) -> int:
        k, v = shape.key_size, shape.value_size
        return self.kv * k * v + self.ck * CHUNK * k + self.cv * CHUNK * v


# Read-out, once a token.      Q S              Q K^T             P U
FORWARD_TOKEN = Products(kv=1, ck=1, cv=1)
# dQ = dO S + dP K: kv, ck     dS += Q^T dO: kv     dU = P^T dO: cv     dP = dO U^T: cv
# dK = dP^T Q: ck              P = Q K^T again: ck
BACKWARD_TOKEN = Products(kv=2, ck=3, cv=2)

# A write, once a step:
#   none:  S += U^T K with U = V.
#   tied:  also K S, K K^T and U = (its inverse) W.
#   free:  also A S, Q B^T, A K^T, A B^T; (A K^T) V, the inverse, (Q B^T) U; and U^T B beside V^T K.
FORWARD_ROW = {
    "none": Products(kv=1, ck=0, cv=0),
    "tied": Products(kv=2, ck=1, cv=1),
    "free": Products(kv=3, ck=3, cv=3),
}
#   none:  dU += K dS and dK += U dS.
#   tied:  also dW = T^T dU: cv, dA = dW U^T: cv, dK = dA K + dA^T K: 2 ck, dK = dW S: kv,
#          dS = dW^T K: kv; K S, K K^T and U again: kv, ck, cv.
#   free:  the derivation above for four score matrices: 9 kv, 12 ck, 10 cv with the read-out.
BACKWARD_ROW = {
    "none": Products(kv=2, ck=0, cv=0),
    "tied": Products(kv=5, ck=3, cv=3),
    "free": Products(kv=7, ck=9, cv=8),
}


def count(operation: Operation, shape: Shape, *, backward: bool) -> Count:
    """Bytes and operations of a forward pass; with `backward` also from the gradient of o to all.

    Examples:
        >>> from bench.cases import OPERATIONS, SHAPES
        >>> shape = SHAPES["8x4096-h16"]
        >>> round(count(OPERATIONS["gdn"], shape, backward=False).floor_ms, 3)
        0.129
        >>> round(count(OPERATIONS["gdn"], shape, backward=True).floor_ms, 3)
        0.381
    """
    softmax, decode = (operation is OPERATIONS[name] for name in ("softmax", "decode"))
    rows = shape.batch * shape.tokens * shape.value_heads
    with FakeTensorMode():
        inputs = sum(x.nbytes for x in draw(operation, shape, device="cpu").values())
    output = HALF * rows * shape.value_size
    state = shape.batch * shape.value_heads * shape.value_size * shape.key_size
    # Inputs read, of a decoding step its state too; o and the final state written.
    moved = inputs + output + (0 if softmax else SINGLE * state)
    if decode:
        return Count(moved, 2 * 3 * state)
    products = attention_products if softmax else chunk_products
    done = products(operation, shape, backward=False)
    if backward:
        # Inputs and the gradient of o read again, a gradient written for each input; softmax
        # attention reads o as well, for the sums of its rows.
        moved += 2 * inputs + (2 if softmax else 1) * output
        done += products(operation, shape, backward=True)
    return Count(moved, 2 * rows * done)


def chunk_products(operation: Operation, shape: Shape, *, backward: bool) -> int:
    """Multiply-adds a token and head of the chunked form, whose backward pass has the states."""
    token = BACKWARD_TOKEN if backward else FORWARD_TOKEN
    row = (BACKWARD_ROW if backward else FORWARD_ROW)[operation.erase]
    return token.per_row(shape) + operation.n_steps * row.per_row(shape)


def attention_products(operation: Operation, shape: Shape, *, backward: bool) -> int:
    """Multiply-adds a token and head of causal attention, which reads half of all tokens.

    K for the scores, V for the sum; the backward pass makes the scores again, and dV, dP, dQ and dK
    from them.
    """
    k, v = shape.key_size, shape.value_size
    return shape.tokens * (3 * k + 2 * v if backward else k + v) // 2
