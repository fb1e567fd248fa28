"""The registered operator behind `selective_scan`.

Under vmap the mapped axis becomes heads, which are independent of each other and which every
argument has.
"""

from torch import Tensor

from deltarule.ops.folding import Fold
from deltarule.ops.operators import Backend, Recurrence
from deltarule.ops.selective_scan import torch as torch_kernels
from deltarule.ops.selective_scan.inputs import ScanInputs


def backend_of(name: str) -> Backend:
    """Triton is an extra, imported where it runs."""
    if name == "torch":
        forms = torch_kernels.forward, torch_kernels.backward, torch_kernels.chunk_states_shape
        return Backend(*forms)
    from deltarule.ops.selective_scan.triton import passes

    return Backend(passes.forward, passes.backward, passes.saved_shape)


def head_axis(name: str, x: Tensor, packed: bool) -> int:
    """Axis of the heads; what is constant over time has no others before it."""
    if name in ("initial_state", "final"):
        return 1
    return 0 if x.ndim == 3 else 2


def same_offsets(cu_seqlens: Tensor, size: int) -> Tensor:
    """More heads have the same sequences."""
    return cu_seqlens


fold = Fold(head_axis, same_offsets, ("o", "final"))
scan_operator = Recurrence("selective_scan", ScanInputs, backend_of, 9, fold)
