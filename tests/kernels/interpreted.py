"""`impl="triton"` on a CPU, where Triton's interpreter runs the kernels."""

import pytest
import torch

from deltarule import pack
from deltarule.ops.delta_rule import implementations
from deltarule.ops.delta_rule.inputs import Inputs, check_arguments
from deltarule.ops.dispatch import always
from oracle import NAMES, Case

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here: tests on a GPU run them"
)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators take tensors of the CPU for Triton's kernels."""
    table = implementations.IMPLEMENTATIONS
    monkeypatch.setitem(table, "triton", table["triton"]._replace(why_not=always))


def inputs_of(case: Case, device: str = "cpu", *, state: bool = True) -> Inputs:
    """What the kernels of a call are given."""
    x = {name: None if y is None else y.to(device) for name, y in case.tensors.items()}
    if not state:
        x["initial_state"] = None
    offsets = None if case.lengths is None else pack(case.lengths).to(device)
    inputs = Inputs(
        **{name: x[name] for name in NAMES},
        cu_seqlens=offsets,
        n_steps=case.n_steps,
        normalize_qk=case.normalize_qk,
    )
    return check_arguments(inputs, None)
