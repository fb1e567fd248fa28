"""Rows of what the roles of the gradients leave each other in shared memory."""

from triton.experimental.gluon import language as gl

# Factors: of what is read, erased and written; of q and of k in pairs; beta; the sums of decays;
# 1 / |q|^2 and 1 / |k|^2; of packed sequences, as int32, where their dbeta lies, -1 after the end:
# looking it up takes as many loads as the search has steps; and what is written, without beta.
READS, ERASES, WRITES, QUERY, KEY = map(gl.constexpr, range(5))
BETAS, WHOLES, RESTS, QUERY_NORM, KEY_NORM, PLACES, BARE_WRITES = map(gl.constexpr, range(5, 12))
FACTORS = gl.constexpr(12)
# Sums of rows for dlog_decay, as triton/gradients.py names them.
OF_QUERIES, OF_KEYS, OF_WRITES, OF_HELD = map(gl.constexpr, range(4))
