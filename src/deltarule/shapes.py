"""The letters, the shapes they make, and the one result type of every operator.

B   batch rows                      T   tokens in a row
n   steps a token (`n_steps`)       N   sequences: B, or len(cu_seqlens) - 1 when packed
H   query and key heads             HV  value heads, a multiple of H
K   channels of a query or key      V   channels of a value

Value head h reads key head h * H // HV. Step j of token t is row t * n + j of k, v and beta.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

Queries = Float[Tensor, "B T H K"]
Keys = Float[Tensor, "B T*n H K"]
Values = Float[Tensor, "B T*n HV V"]
Beta = Float[Tensor, "B T*n HV"]
Decay = Float[Tensor, "HV"] | Float[Tensor, "B T HV"] | Float[Tensor, "B T HV K"]
Erase = Float[Tensor, "B T HV K"]
State = Float[Tensor, "N HV V K"]
Offsets = Int[Tensor, "N+1"]
Outputs = Float[Tensor, "B T HV V"]
Mask = Bool[Tensor, "B T"]
Hidden = Float[Tensor, "B T D"]


class RecurrentOutput(NamedTuple):
    """What every operator returns: outputs, and the state after the last token of each sequence."""

    o: Outputs
    final_state: State | None
