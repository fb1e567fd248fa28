"""The registered operator behind `selective_scan`.

Under vmap the mapped axis becomes heads, which are independent of each other and which every
argument has.
"""

from deltarule.ops.folding import MORE_HEADS
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


scan_operator = Recurrence("selective_scan", ScanInputs, backend_of, 9, MORE_HEADS)
