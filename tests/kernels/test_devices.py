"""Kernels run on the GPU where their tensors are, whichever GPU is the current one."""

import ast
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from promised import promised

promised("triton")

from triton import knobs

import deltarule
from deltarule import delta_rule
from deltarule.ops.runtime import launch as direct
from deltarule.ops.runtime import named
from deltarule.ops.runtime.launch import HERE, Launch, there
from neighbours import MAKERS, with_gradients
from ops.contract import OPERATORS as CONTRACT
from ops.contract import gradients
from truth import second_gpu

FOLDER = Path(deltarule.ops.__file__).parent


def launches_of_its_own(source: str) -> list[int]:
    """The lines where `kernel[grid](...)` is called."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and "kernel" in ast.unparse(node.func.value)
    ]


def test_such_a_launch_is_seen() -> None:
    assert launches_of_its_own("x = 1\nscan_kernel[grid](x)\nself.kernel[1,](x)\n") == [2, 3]
    assert launches_of_its_own("launch(scan_kernel, grid, (x[0](1),), {})") == []


@pytest.mark.parametrize(
    "file", sorted(FOLDER.rglob("*.py")), ids=lambda file: str(file.relative_to(FOLDER))
)
def test_every_kernel_is_launched_by_the_file_that_looks_at_devices(file: Path) -> None:
    assert bool(launches_of_its_own(file.read_text())) == (file == Path(direct.__file__))


class Gpus:
    """Two GPUs of which one is current."""

    def __init__(self) -> None:
        self.current, self.launched = 0, []

    @contextmanager
    def device(self, place: torch.device):
        before, self.current = self.current, place.index
        yield
        self.current = before


class Second(torch.Tensor):
    """A tensor said to be on the second GPU."""

    device = torch.device("cuda:1")


@pytest.fixture
def gpus(monkeypatch):
    gpus = Gpus()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(torch.cuda, "device", gpus.device)
    monkeypatch.setattr(
        Launch, "launch", lambda self, grid, given: gpus.launched.append(gpus.current)
    )
    return gpus


def test_only_another_device_is_made_the_current_one(gpus) -> None:
    assert there(torch.device("cpu")) is HERE
    assert there(torch.device("cuda:0")) is HERE
    with there(torch.device("cuda:1")):
        assert gpus.current == 1
        assert there(torch.device("cuda:1")) is HERE
    assert gpus.current == 0


class Kernel:
    """What a launch asks of a kernel: the names of its parameters, constants with a type."""

    arg_names = ("x", "n", "y", "BLOCK")
    fn = SimpleNamespace(__annotations__={"BLOCK": int})


def launch(**values) -> None:
    values = {"x": None, "n": 3, "y": torch.zeros(2), "BLOCK": 16, "of_others": 1} | values
    named.launch(Kernel, (1, 1, 1), values)


def test_a_launch_goes_where_its_tensors_are(gpus) -> None:
    for y in (torch.zeros(2), torch.zeros(2).as_subclass(Second)):
        launch(y=y)
    assert gpus.launched == [0, 1]
    assert gpus.current == 0


def test_calls_with_the_same_constants_share_a_launch(gpus) -> None:
    named.launches.clear()
    for size in (16, 32, 16, 16):
        launch(BLOCK=size)
    assert [x.constants["BLOCK"] for x in named.launches.values()] == [16, 32]
    # Whether products and sums are fused is the kernel's to say.
    launch(enable_fp_fusion=False)
    assert [x.constants["enable_fp_fusion"] for x in named.launches.values()] == [1, 1, 0]
    assert "of_others" not in next(iter(named.launches.values())).constants
    with pytest.raises(KeyError, match="n"):
        named.launch(Kernel, (1, 1, 1), {"x": None})
    named.launches.clear()


def neighbour(make):
    """The fused form and its gradients, on a device."""
    case = make()
    weights = [torch.randn_like(x) for x in case.plain(case.tensors)]

    def run(device: str) -> list[torch.Tensor]:
        outputs, gradients = with_gradients(
            case.fused, case.to(torch.float32, device).tensors, weights
        )
        return [*outputs, *gradients.values()]

    return run


def beside(name: str):
    operator = CONTRACT[name]
    tensors = operator.draw(tokens=300)

    def run(device: str) -> list[torch.Tensor]:
        moved = {
            name: x.to(device, torch.float32 if x.is_floating_point() else x.dtype)
            for name, x in tensors.items()
        }
        outputs, found = gradients(operator, moved, impl="triton")
        return [*outputs, *found.values()]

    return run


def recurrence():
    q, k, v = torch.randn(3, 1, 128, 2, 32).unbind()
    beta = torch.rand(1, 128, 2)

    def run(device: str) -> list[torch.Tensor]:
        given = [x.to(device).bfloat16() for x in (q, k, v)]
        # Searched for, recorded, replayed.
        outputs = [
            delta_rule(*given, beta=beta.to(device), normalize_qk=True, impl="triton")
            for _ in range(4)
        ]
        assert all(torch.equal(x.o, outputs[0].o) for x in outputs)
        return [outputs[-1].o, outputs[-1].final_state]

    return run


OPERATORS = {
    **{
        name: lambda make=make: neighbour(make)
        for name, make in MAKERS.items()
        if name != "conv, all empty"
    },
    "selective scan": lambda: beside("all"),
    **{
        name: lambda name=name: beside(name)
        for name in ("mesa", "ttt", "titans", "titans of two maps")
    },
    "recurrence": recurrence,
}


@pytest.mark.gpu
@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS)
def test_a_gpu_that_is_not_the_current_one(make, monkeypatch) -> None:
    second, run, seen = str(second_gpu()), make(), []
    with torch.cuda.device(0):
        expected = run("cuda:0")
        found = run(second)
        # Through Triton's search, with a look at the device of each launch.
        hook = lambda metadata: seen.append(torch.cuda.current_device())  # noqa: E731
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
        watched = run(second)
        assert torch.cuda.current_device() == 0
    assert set(seen) == {1}
    for x, y, z in zip(expected, found, watched, strict=True):
        assert y.device == z.device == torch.device(second)
        assert torch.equal(x.cpu(), y.cpu())
        assert torch.equal(x.cpu(), z.cpu())
