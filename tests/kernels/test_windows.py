"""The backward in windows: the same numbers bit for bit, as many as pay, and less memory."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.interpreted import inputs_of, interpreted
from oracle import make_case, weights
from promised import promised

promised("triton")

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes, windows
from deltarule.ops.delta_rule.triton import plan as launch
from deltarule.ops.runtime import launch as direct

CASES = {
    "gated": {"tokens": 130, "batch": 2},
    "delta": {"decay": "none", "tokens": 130, "normalize_qk": True},
    "attention": {"decay": "head", "erase": "none", "tokens": 130, "value_heads": 2},
    "steps": {"n_steps": 2, "tokens": 70},
    "full tiles": {"tokens": 192, "key_size": 16, "value_size": 16},
    "packed": {"lengths": (3, 0, 130, 40)},
    "empty": {"lengths": (0, 0, 5), "decay": "none"},
}


def drawn(
    options: dict[str, object], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Inputs, tuple]:
    """A call, and gradients by what it returns."""
    case = make_case(**{"batch": 1, "heads": 1, "value_heads": 1, "beta_max": 1.0} | options)
    d_o, d_state = weights(case)
    given = d_o.to(device, dtype), d_state.to(device, torch.float32)
    return inputs_of(case.to(dtype), device), given


def gradients(inputs: Inputs, weighted: tuple, save: bool) -> list[torch.Tensor]:
    """Outputs and gradients of one call."""
    o, final, saved = passes.forward(inputs, save)
    found = passes.backward(*weighted, inputs, saved)
    return [o, final, *(x for x in found if x is not None)]


# A decay per channel is never cut into windows.
@pytest.mark.parametrize(
    ("options", "parts"),
    [({"tokens": 130}, 1), ({"tokens": 130}, 2), ({"tokens": 70, "decay": "channel"}, 1)],
)
def test_no_gradient_by_the_final_state_is_one_of_zeros(options, parts, monkeypatch) -> None:
    cut_into(parts, monkeypatch)
    inputs, (d_o, d_final) = drawn(options, torch.float32)
    for save in (True, False):
        expected = gradients(inputs, (d_o, torch.zeros_like(d_final)), save)
        found = gradients(inputs, (d_o, None), save)
        assert all(map(torch.equal, found, expected))


def cut_into(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into so many windows, whatever the size."""
    cut = windows.cut_into
    by_head = lambda call: None if call.inputs.by_channel else cut(call, parts)  # noqa: E731
    monkeypatch.setattr(windows, "windows_of", by_head)


@pytest.mark.parametrize("most", [2**30, 0])
def test_a_forward_in_one_kernel_is_taken_again(most, monkeypatch) -> None:
    def forward(call, save):
        if not save:
            passes.keep(call, save)
        passes.scores(call)
        taken.append(save)
        return passes.scan(call, output=True)

    taken: list[bool] = []
    monkeypatch.setattr(passes, "fused_stage", lambda _: stage)
    monkeypatch.setattr(stage, "forward", forward)
    monkeypatch.setattr(stage, "pays", lambda *_: True)
    monkeypatch.setattr(stage, "taken_in_parts", lambda inputs, _: inputs)
    monkeypatch.setattr(stage, "MOST_AGAIN", most)
    cut_into(2, monkeypatch)
    inputs, weighted = drawn({"tokens": 130}, torch.float32)
    whole = gradients(inputs, weighted, True)
    assert all(map(torch.equal, whole, gradients(inputs, weighted, False)))
    # The two forwards, and the one that keeps in the second backward.
    assert taken == [True, False, True][: 3 if most else 2]


@interpreted
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_windows_change_nothing(options, monkeypatch) -> None:
    dtype = torch.float32 if options.get("lengths") else torch.float16
    inputs, weighted = drawn(options, dtype)
    whole = gradients(inputs, weighted, True)
    assert all(map(torch.equal, whole, gradients(inputs, weighted, False)))
    cut_into(3, monkeypatch)
    assert all(map(torch.equal, whole, gradients(inputs, weighted, False)))


@interpreted
@pytest.mark.parametrize("lengths", [None, (3, 0, 200)], ids=["dense", "packed"])
def test_windows_of_segments_change_nothing(lengths, monkeypatch) -> None:
    monkeypatch.setattr(launch, "chunks_per_segment", lambda *shapes: 2)
    inputs, weighted = drawn({"tokens": 230, "lengths": lengths}, torch.float32)
    whole = gradients(inputs, weighted, False)
    cut_into(2, monkeypatch)
    assert all(map(torch.equal, whole, gradients(inputs, weighted, False)))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_windows_change_nothing_on_a_gpu(options, parts, monkeypatch) -> None:
    sizes = {"key_size": 128, "value_size": 128, "value_heads": 2}
    # Long enough for segments, too: packed sequences, and rows of few heads.
    longer = {"tokens": 1100} if "lengths" not in options else {"lengths": (3, 0, 900, 200)}
    inputs, weighted = drawn(options | sizes | longer, torch.bfloat16, "cuda")
    whole = gradients(inputs, weighted, False)
    cut_into(parts, monkeypatch)
    assert all(map(torch.equal, whole, gradients(inputs, weighted, False)))


def call(batch: int, tokens: int, *, gated: bool = True, heads: int = 16, **changes) -> Inputs:
    """A call without data."""
    x = torch.empty(batch, tokens, heads, 128, dtype=torch.bfloat16, device="meta")
    gate = torch.empty(batch, tokens, heads, device="meta")
    log_decay = gate if gated else None
    return Inputs(x, x, x, gate, log_decay=log_decay)._replace(**changes)


def planned(inputs: Inputs) -> tuple[str, int, int] | None:
    """Kind, number and chunks of the windows of a call."""
    cut = windows.windows_of(launch.Call(inputs, launch.new_plan(inputs)))
    return None if cut is None else (cut.kind, cut.parts, cut.chunks)


def test_windows_are_as_many_as_are_worth_it(monkeypatch) -> None:
    assert planned(call(8, 4096)) == ("stretch", 8, 8)
    assert planned(call(1, 4096)) is planned(call(8, 512)) is None
    assert planned(call(1, 0, heads=1)) is None
    # One window after the other leaves of long packed sequences too few to scan at a time.
    offsets = torch.empty(9, dtype=torch.int32, device="meta")
    assert planned(call(1, 32768, cu_seqlens=offsets)) is None
    offsets = torch.empty(65, dtype=torch.int32, device="meta")
    assert planned(call(1, 32768, cu_seqlens=offsets)) == ("row", 3, 192)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    assert planned(call(2, 16384)) == ("stretch", 8, 8)


class Peak(TorchDispatchMode):
    """The largest number of bytes that the tensors made inside took at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, size: int) -> None:
        self.now -= size


def peak_mib(inputs: Inputs, save: bool) -> int:
    """Of a forward and backward beyond the inputs, in MiB."""
    with Peak() as peak:
        o, final, saved = passes.forward(inputs, save)
        d_o, d_final = torch.empty_like(o), torch.empty_like(final)
        before = peak.now
        del final
        result = passes.backward(d_o, d_final, inputs, saved)
        assert peak.most > before
        del result
    # The gradient by o is given.
    return round((peak.most - d_o.nbytes) / 2**20)


def test_the_peak_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(direct.Launch, "__call__", lambda *given: None)
    # o, what the forward kept, the gradients, what the backward keeps, and dS0 and dS.
    assert peak_mib(call(8, 4096), save=True) == 1456
    assert peak_mib(call(8, 4096, gated=False), save=True) == 1374
    # Without an erase X goes to dv alone.
    assert peak_mib(call(8, 4096, beta=None), save=True) == 1134
    assert peak_mib(call(8, 4096), save=False) <= 854
    monkeypatch.setattr(windows, "LEAST_BYTES", 2**60)
    assert peak_mib(call(8, 4096), save=False) == 1456
