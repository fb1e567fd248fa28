"""A first call compiles its kernels side by side, and runs as any other."""

import inspect
import threading
from types import SimpleNamespace

import pytest
import torch

from promised import promised

promised("triton")

from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime._async_compile import active_mode

from deltarule import delta_rule
from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes
from deltarule.ops.dispatch import forget_calls
from deltarule.ops.runtime import launch as compilation
from deltarule.ops.runtime.compilations import compilations
from deltarule.ops.runtime.launch import ONLY_COMPILED, Launch, compiled_together


class Kernel:
    """Notes what is asked of it."""

    arg_names = ("x", "n", "BLOCK")

    def __init__(self) -> None:
        self.pre_run_hooks, self.compiled, self.ran = [], [], []

    def warmup(self, *given, grid, **constants) -> None:
        self.compiled.append((given, grid, constants["BLOCK"]))

    def __getitem__(self, grid):
        return lambda *given, **constants: self.ran.append((given, grid, constants["BLOCK"]))


def test_launches_inside_only_compile() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    launch = Launch(kernel, {"BLOCK": 4})
    token = ONLY_COMPILED.set(True)
    launch((2, 1, 1), x, 3)
    ONLY_COMPILED.reset(token)
    assert kernel.compiled == [((x, 3), (2, 1, 1), 4)]
    assert kernel.ran == []
    launch((2, 1, 1), x, 3)
    assert kernel.ran == kernel.compiled


@pytest.fixture
def calls(monkeypatch):
    """Nothing was compiled before, and no graph is captured."""
    monkeypatch.setattr(compilation, "compiled", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return compiled_together


def test_a_kind_and_a_plan_are_compiled_once_and_only_on_a_gpu(calls, monkeypatch) -> None:
    runs = []
    for kind in (1, 2, 1):
        calls(lambda kind=kind: runs.append(kind), kind)
    assert runs == [1, 2]
    monkeypatch.setattr(passes, "compiled_together", lambda run, kind: run())
    monkeypatch.setattr(passes.plan, "kernel_key", lambda inputs, plan: None)
    plan = SimpleNamespace(made={})
    monkeypatch.setattr(passes.plan, "make_plan", lambda inputs: plan)
    first = passes.compiled_first(lambda inputs, save: runs.append(save))
    for is_cuda in (False, True, True):
        inputs = SimpleNamespace(q=SimpleNamespace(is_cuda=is_cuda))
        first(inputs, True)
        assert runs[2:] == [True] * is_cuda
    first(inputs, False)
    assert runs[2:] == [True, False]


def test_a_kernel_that_does_not_compile_leaves_the_others_alone(calls) -> None:
    compiled = []

    def fails() -> None:
        raise MemoryError("no room for the kernel")

    def compiles() -> None:
        active_mode.get().submit("one", fails, compiled.append)
        active_mode.get().submit("other", lambda: None, compiled.append)

    def lacks_memory() -> None:
        compiles()
        raise torch.cuda.OutOfMemoryError

    # Errors are left to the launch; nothing of the mode is left to the next call.
    calls(compiles, 1)
    calls(lacks_memory, 2)
    assert compiled == [None, None]
    assert active_mode.get() is None
    runs = []
    calls(lambda: runs.append(ONLY_COMPILED.get()), 3)
    assert runs == [True]
    assert not ONLY_COMPILED.get()


def test_launchers_are_made_side_by_side_too(calls, monkeypatch) -> None:
    made, both = [], threading.Barrier(2, timeout=30)

    def launcher(src, metadata) -> None:
        both.wait()
        made.append((src, metadata))
        raise RuntimeError("no compiler for C: the launch will tell")

    active = SimpleNamespace(launcher_cls=launcher)
    monkeypatch.setattr(compilation, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compilation.os, "cpu_count", lambda: 2)

    def compiles() -> None:
        for name in "ab":
            kernel = SimpleNamespace(src=name, metadata=name.upper())
            active_mode.get().submit(name, lambda kernel=kernel: kernel, lambda kernel: None)

    calls(compiles, 1)
    assert sorted(made) == [("a", "A"), ("b", "B")]


def test_triton_makes_a_launcher_of_these_two() -> None:
    assert list(inspect.signature(CudaLauncher).parameters) == ["src", "metadata"]


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_a_forward_that_saves_compiles_the_backward_too(decay, monkeypatch) -> None:
    launched = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *given: launched.append(launch.kernel))

    # A call on the CPU taken for one on a GPU.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(passes, "compiled_together", lambda run, kind: run())
    q, k, v = torch.randn(3, 1, 70, 2, 16).unbind()
    size = {"none": None, "head": (1, 70, 2), "channel": (1, 70, 2, 16)}[decay]
    gate = None if size is None else -torch.rand(size)
    beta = torch.rand(1, 70, 2)
    inputs = Inputs(q, k, v, beta, log_decay=gate, scale=0.5)

    def kernels(run) -> tuple[object, list[object]]:
        launched.clear()
        return run(), list(launched)

    forget_calls()
    (o, final, saved), first = kernels(lambda: passes.forward(inputs, True))
    _, last = kernels(lambda: passes.forward(inputs, False))
    forget_calls()
    _, forward = kernels(lambda: passes.forward_stages.run(inputs, True))
    _, backward = kernels(lambda: passes.gradient_stages.run(inputs, o, final, saved))
    assert len(backward) >= 2
    assert first == [*forward, *backward, *forward]
    assert last == [*forward, *forward]


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_a_first_call_compiles_all_there_is_and_is_right(decay, monkeypatch) -> None:
    monkeypatch.setattr(compilation, "compiled", set())
    # As many heads as no other test has.
    q, k, v = (torch.randn(3, 1, 200, 7, 48, device="cuda") / 7).bfloat16().unbind()
    size = {"none": (), "head": (1, 200, 7), "channel": (1, 200, 7, 48)}[decay]
    log_decay = -torch.rand(size, device="cuda") if size else None
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        beta = torch.ones(1, 200, 7, device="cuda")
        return delta_rule(q, k, v, beta=beta, log_decay=log_decay).o

    def run(o: torch.Tensor) -> list[torch.Tensor]:
        return [o, *torch.autograd.grad(o, leaves, torch.ones_like(o))]

    through_triton, late = Launch.through_triton, []

    def launched(launch, *given):
        with compilations() as found:
            kernel = through_triton(launch, *given)
        late.extend(found)
        return kernel

    monkeypatch.setattr(Launch, "through_triton", launched)
    with compilations() as found:
        o = forward()
    with compilations() as more:
        first = run(o)
    # All that a launch needs was compiled before it, and all of the backward with the forward.
    assert late == []
    assert len(found) >= 4
    assert more == []
    second = run(forward())
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
