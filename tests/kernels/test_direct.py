"""Launches past Triton's search: never a binary that Triton itself would not have taken."""

import ast
import inspect
import itertools
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from promised import promised

promised("triton")

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

from deltarule.ops.delta_rule.inputs import Inputs
from deltarule.ops.delta_rule.triton import passes
from deltarule.ops.delta_rule.triton import plan as launch
from deltarule.ops.runtime import launch as direct
from deltarule.ops.runtime import tensor_maps
from deltarule.ops.runtime.launch import Launch, signature, unwrapped, watched

# What `JITFunction.run` reads of Triton's settings: each is looked at before a direct launch, but
# for one that counts only together with `instrumentation_mode`.
SETTINGS = {
    "runtime.debug", "compilation.instrumentation_mode", "runtime.launch_enter_hook",
    "runtime.launch_exit_hook", "runtime.add_stages_inspection_hook",
}  # fmt: skip
ONLY_INSTRUMENTED = {"compilation.fpsan_homomorphic_casts"}


def three(x, number, other, FLAG: tl.constexpr):
    """A kernel of an argument of any kind, a number, one that is not looked at, and a constant."""


KERNEL = jit.JITFunction(three, do_not_specialize=["other"])
MEMORY = torch.zeros(64, dtype=torch.float32)
WHOLE = (0, 1, 2, 8, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, -1, -(2**31), -(2**31) - 1, 2**63)
ARGUMENTS = [
    None, *WHOLE, 0.0, 1.0, 2.5, float("inf"), float("nan"),
    *(MEMORY.view(dtype) for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.float16,
                                       torch.int64, torch.float64, torch.uint8, torch.bool)),
    torch.nn.Parameter(MEMORY), MEMORY[4:], MEMORY[1:], MEMORY.view(torch.bfloat16)[3:],
]  # fmt: skip


def searched(*arguments: object) -> str:
    """Triton's key of a launch."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = jit.create_function_from_signature(KERNEL.signature, KERNEL.params, backend)
    _, specialization, options = binder(*arguments, FLAG=True, num_warps=4)
    return jit.compute_cache_key({}, specialization, options)


def keys() -> list[tuple[tuple[object, ...], str]]:
    """Keys here and in Triton, of all arguments that are launched directly."""
    some = [None, MEMORY, 1, 16, 7, 2**31, 1.0]
    found = []
    for arguments in itertools.product(ARGUMENTS, some, some):
        if (key := signature(arguments)) is not None:
            found.append((key[0], searched(*arguments)))
    return found


def confused(pairs: list[tuple[object, str]]) -> bool:
    """Whether one key stands for several of Triton's."""
    seen: dict[object, str] = {}
    return any(seen.setdefault(key, search) != search for key, search in pairs)


def test_a_key_tells_apart_all_that_triton_does() -> None:
    found = keys()
    assert len(found) > 1000
    assert not confused(found)


@pytest.mark.parametrize(
    "x",
    [True, "a", MEMORY[1:], MEMORY.view(torch.bfloat16)[3:], tl.constexpr(1), [1], tl.float32,
     TensorDescriptor(MEMORY, [8, 8], [8, 1], [8, 8]), torch.float32],
)  # fmt: skip
def test_what_is_unusual_is_left_to_triton(x: object) -> None:
    assert signature((MEMORY, MEMORY[4:])) is not None
    assert signature((MEMORY, x, MEMORY)) is None


def test_a_tensor_elsewhere_is_left_to_triton(monkeypatch) -> None:
    other = torch.zeros(64)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: -1 if x is other else 0)
    assert signature((MEMORY, None, MEMORY[4:])) is not None
    assert signature((MEMORY, None, other)) is None


def test_every_setting_that_triton_reads_is_looked_at() -> None:
    source = textwrap.dedent(inspect.getsource(jit.JITFunction.run))
    source += textwrap.dedent(inspect.getsource(jit.JITFunction.create_binder))
    read = {
        f"{node.value.attr}.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "knobs"
    }
    assert read
    assert read <= SETTINGS | ONLY_INSTRUMENTED


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_any_setting_leaves_the_launch_to_triton(setting: str, monkeypatch) -> None:
    assert not watched(KERNEL)
    group, name = setting.split(".")
    monkeypatch.setattr(getattr(direct.knobs, group), name, print, raising=False)
    assert watched(KERNEL)


def test_a_hook_in_a_chain_and_one_of_the_kernel_do_too(monkeypatch) -> None:
    chain = SimpleNamespace(calls=[])
    monkeypatch.setattr(direct.knobs.runtime, "launch_enter_hook", chain)
    assert not watched(KERNEL)
    chain.calls.append(print)
    assert watched(KERNEL)
    chain.calls.clear()
    assert watched(SimpleNamespace(pre_run_hooks=[print]))


class Fake:
    """A kernel, its compiler, its launcher and its GPU: each launch is written down."""

    arg_names = ("x", "y", "number", "BLOCK", "steps")

    def __init__(self, described: int = 0) -> None:
        self.device, self.stream, self.described = 0, 7, described
        self.searched: list[tuple[object, ...]] = []
        self.launched: list[tuple[object, ...]] = []
        self.maps: list[int] = []

    def __getitem__(self, grid: object):
        def run(*arguments: object, **constants: object) -> CompiledKernel:
            self.searched.append((grid, arguments, constants))
            return self.compiled(len(self.searched))

        return run

    def compiled(self, function: int) -> CompiledKernel:
        found = CompiledKernel.__new__(CompiledKernel)
        found.module, found.function, found.packed_metadata = None, function, (4, 1, 0)
        found.metadata = SimpleNamespace(tensordesc_meta=[{"swizzle": 1}] * self.described)
        found._run = Launcher(self)
        return found

    def make(self, descriptor: TensorDescriptor, metadata: object) -> list[object]:
        self.maps.append(descriptor.base.data_ptr())
        return ["map", descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides]


class Launcher:
    """As Triton's: where there are tiles, a step that makes tensor maps goes before the launch."""

    def __init__(self, fake: Fake) -> None:
        launcher = lambda *given: fake.launched.append(given)  # noqa: E731

        def inner(*given: object) -> None:
            launcher("through the first step", *given)

        self.launch = inner if fake.described else launcher

    def __call__(self, *given: object) -> None:
        self.launch(*given)


@pytest.fixture
def fake(monkeypatch):
    return installed(Fake(), monkeypatch)


def installed(fake: Fake, monkeypatch) -> Fake:
    active = SimpleNamespace(
        get_current_device=lambda: fake.device, get_current_stream=lambda device: fake.stream,
        launcher_cls=Launcher,
    )  # fmt: skip
    for module in (direct, tensor_maps):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setitem(globals(), "make_tensordesc_arg", fake.make)
    return fake


CONSTANTS = {"steps": 3, "BLOCK": 16, "num_warps": 4}
GRID = (1, 2, 3)


def test_a_second_launch_goes_past_the_search(fake) -> None:
    kernel = Launch(fake, CONSTANTS)
    x = torch.zeros(8)
    kernel(GRID, x, None, 5)
    assert fake.launched == []
    (grid, arguments, constants), *_ = fake.searched
    assert (grid, arguments) == (GRID, (x, None, 5))
    assert constants == {**CONSTANTS, "enable_fp_fusion": True}
    fake.stream = 9
    kernel((4, 5, 6), y := torch.zeros(8), None, 5)
    assert len(fake.searched) == 1
    expected = (4, 5, 6, 9, 1, (4, 1, 0), None, None, None, y.data_ptr(), None, 5, 16, 3)
    assert fake.launched == [expected]


def nvidia_launcher() -> Any:
    """Triton's own, for a kernel that asks for no memory; its function in C is missing."""
    from triton.backends.nvidia.driver import CudaLauncher

    found: Any = CudaLauncher.__new__(CudaLauncher)
    names = ("global_scratch_align", "profile_scratch_align", "launch_cooperative_grid",
             "launch_pdl", "arg_annotations", "kernel_signature")  # fmt: skip
    vars(found).update({name: name for name in names})
    found.global_scratch_size = found.profile_scratch_size = 0
    found.num_ctas = 1
    return found


class Launcher36:
    """Of Triton 3.6: what a kernel was compiled for goes before what a launch is given."""

    global_scratch_size = profile_scratch_size = 0

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *given: object) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *given)


@pytest.mark.parametrize("make", [Launcher36, nvidia_launcher])
def test_the_function_behind_a_launcher_is_called_as_the_launcher_calls_it(make) -> None:
    launcher, seen = make(), []
    launcher.launch = lambda *given: seen.append(given)
    own, rest = (1, (4, 1, 0), None, None, None), (16, 2.5, None)
    run, function = unwrapped(launcher, own)
    assert seen == []
    run(*GRID, 7, *function, *rest)
    launcher(*GRID, 7, *own, *rest)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    launcher.global_scratch_size = 128
    assert unwrapped(launcher, own) == (launcher, own)
    assert unwrapped(print, own) == (print, own)


ONE = torch.zeros(8), None, 5
# Arguments whose key is another one, and those that have none.
OTHER_KEYS = [
    (torch.zeros(8).bfloat16(), None, 5), (torch.zeros(8), torch.zeros(8), 5),
    (torch.zeros(8), None, 16), (torch.zeros(8), None, 5.0), (torch.zeros(8), 5, None),
]  # fmt: skip
OFF_THE_GRID = torch.zeros(9)[1:], None, 5


@pytest.mark.parametrize("other", [*OTHER_KEYS, OFF_THE_GRID])
def test_another_key_is_searched_for_and_off_the_grid_always(fake, other) -> None:
    kernel = Launch(fake, CONSTANTS)
    for arguments in (ONE, other, other):
        kernel(GRID, *arguments)
    unknown = other is OFF_THE_GRID
    assert len(fake.searched) == 2 + unknown
    assert [launched[4] for launched in fake.launched] == [2] * (not unknown)


def test_another_device_is_and_a_hook_always(fake, monkeypatch) -> None:
    kernel = Launch(fake, CONSTANTS)
    for device in (0, 1, 0, 1):
        fake.device = device
        kernel(GRID, *ONE)
    monkeypatch.setattr(direct.knobs.runtime, "launch_enter_hook", print)
    kernel(GRID, *ONE)
    assert len(fake.searched) == 3
    assert [launched[4] for launched in fake.launched] == [1, 2]


def test_an_unknown_interface_stays_with_triton(fake, monkeypatch) -> None:
    several = Launch(fake, {name: x for name, x in CONSTANTS.items() if name != "steps"})
    for kernel in (several, Launch(fake, CONSTANTS)):
        for _ in range(2):
            kernel(GRID, *ONE)
        monkeypatch.setattr(Fake, "compiled", lambda self, function: None)
    assert len(fake.searched) == 4
    assert fake.launched == []


def test_tensor_maps_are_made_once_for_a_place(monkeypatch) -> None:
    fake = installed(Fake(described=1), monkeypatch)
    kernel = Launch(fake, CONSTANTS, {"x": (8, [8, 8])})
    x, y = torch.zeros(128), torch.zeros(128)
    kernel(GRID, x, None, 5)
    assert isinstance(fake.searched[0][1][0], TensorDescriptor)
    for tensor in (x, y, x, y[:64], x):
        kernel(GRID, tensor, None, 5)
    assert len(fake.searched) == 1
    assert fake.maps == [x.data_ptr(), y.data_ptr(), y.data_ptr()]
    rows = [given[9:15] for given in fake.launched]
    assert rows[0] == rows[2] == ("map", x.data_ptr(), 16, 8, 8, 1)
    assert rows[3] == ("map", y.data_ptr(), 8, 8, 8, 1)
    assert fake.launched[0][15:] == (None, 5, 16, 3)


@pytest.mark.parametrize("count", [0, 2])
def test_maps_of_another_number_stay_with_triton(count: int, monkeypatch) -> None:
    fake = installed(Fake(described=count), monkeypatch)
    kernel = Launch(fake, CONSTANTS, {"x": (8, [8, 8])})
    for _ in range(2):
        kernel(GRID, torch.zeros(128), None, 5)
    assert len(fake.searched) == 2


def test_what_is_kept_has_a_bound(fake, monkeypatch) -> None:
    monkeypatch.setattr(direct, "MOST", 4)
    kernel = Launch(fake, CONSTANTS)
    for number in range(20):
        kernel(GRID, torch.zeros(8), None, number)
        assert len(kernel.binaries) <= 4


def call(**changes) -> Inputs:
    x = torch.zeros(1, 128, 2, 16)
    gate = torch.zeros(1, 128, 2)
    return Inputs(x, x, x, gate, log_decay=gate)._replace(**changes)


def constants(inputs: Inputs, monkeypatch) -> list[tuple[object, ...]]:
    """All that is made of a plan once."""
    monkeypatch.setattr(Launch, "__call__", lambda *given: None)
    plan = launch.new_plan(inputs)
    made, x = launch.Call(inputs, plan), inputs.v
    layouts = [passes.kept_layout(made, save) for save in (False, True)]
    monkeypatch.setattr(passes.plan, "make_plan", lambda inputs: plan)
    passes.forward_stages.run(inputs, True)
    passes.gradient_stages.run(inputs, x, torch.zeros(inputs.state_shape), x.new_empty(0))
    launches = [x for x in plan.made.values() if isinstance(x, Launch)]
    return [
        (plan.tile_key, plan.chunks, plan.sizes, plan.per_segment), *layouts,
        *((x.constants, x.tiles, x.kernel) for x in launches),
    ]  # fmt: skip


OTHERS = {
    "tokens": call(**{name: torch.zeros(1, 64, 2, 16) for name in "qkv"}),
    "values": call(v=torch.zeros(1, 128, 2, 32)),
    "value heads": call(v=torch.zeros(1, 128, 4, 16)),
    "dtype": call(**{name: torch.zeros(1, 128, 2, 16).half() for name in "qkv"}),
    "no erase": call(beta=None),
    "free": call(beta=None, a=torch.zeros(1, 128, 2, 16), b=torch.zeros(1, 128, 2, 16)),
    "no decay": call(log_decay=None),
    "channels": call(log_decay=torch.zeros(1, 128, 2, 16)),
    "packed": call(cu_seqlens=torch.tensor([0, 128])),
    "packed in two": call(cu_seqlens=torch.tensor([0, 8, 128])),
    "steps": call(q=torch.zeros(1, 64, 2, 16), n_steps=2),
    "unit norm": call(normalize_qk=True),
    "batch invariant": call(batch_invariant=True),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_changes_a_plan_changes_its_key(other: Inputs) -> None:
    assert launch.plan_key(other) != launch.plan_key(call())


def test_equal_keys_are_equal_plans(monkeypatch) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 128, 2, 16).transpose(0, 1)[:, :1].transpose(0, 1)
    same = [
        call(scale=2.0), call(initial_state=torch.zeros(1, 2, 16, 16)), call(q=q),
        call(beta=torch.rand(1, 2, 128).mT.bfloat16()),
        call(log_decay=torch.zeros(2).expand(1, 128, 2)),
    ]  # fmt: skip
    # The first call of a process has kernels compiled that later ones may not need.
    constants(call(), monkeypatch)
    for other in same:
        assert launch.plan_key(other) == launch.plan_key(call())
        assert constants(other, monkeypatch) == constants(call(), monkeypatch)


def test_a_plan_makes_a_thing_once_for_each_choice() -> None:
    inputs, seen = call(), []
    made = launch.Call(inputs, launch.new_plan(inputs))

    def make(call: launch.Call, *choices: object) -> int:
        seen.append(choices)
        return len(seen)

    assert [made.once(make, x) for x in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert seen == [(1,), (2,)]


def test_a_launch_asks_for_what_its_kernel_names(fake) -> None:
    def kernel(q, number, K: tl.constexpr, FLAG: tl.constexpr):
        """The parameters of a kernel."""

    fake.fn, fake.arg_names = kernel, ("q", "number", "K", "FLAG")
    inputs = call()
    made = launch.Call(inputs, launch.new_plan(inputs))
    for flag in (True, False, True):
        made.launch(fake, GRID, {"number": 7, "FLAG": flag, "num_warps": 2})
    assert [given for _, given, _ in fake.searched] == [(inputs.q, 7)] * 2
    assert [x["FLAG"] for *_, x in fake.searched] == [True, False]
    assert {(x["K"], x["num_warps"]) for *_, x in fake.searched} == {(16, 2)}
    assert len(fake.launched) == 1
    with pytest.raises(TypeError, match=r"a kernel asks for \['FLAG', 'number'\]"):
        made.launch(fake, GRID, {})


def test_the_sizes_of_a_kernel_are_one_constant(fake) -> None:
    def kernel(q, S: tl.constexpr):
        """The parameters of a kernel."""

    fake.fn, fake.arg_names = kernel, ("q", "S")
    made = launch.Call(inputs := call(), launch.new_plan(inputs))
    for values in (16, 32, 16):
        made.launch(fake, GRID, {"BV": values})
    assert [x["S"].BV for *_, x in fake.searched] == [16, 32]
    assert {(x["S"].K, x["S"].ERASE, x["S"].BC) for *_, x in fake.searched} == {(16, "tied", None)}


def test_a_tile_of_four_axes_has_the_rows_up_to_an_end() -> None:
    width, row, rows, column = 256, 37, 5, 128
    x = torch.empty(100, width, dtype=torch.bfloat16)
    found = tensor_maps.described(x, width, [1, 1, 64, 64])
    sizes, strides = found.shape, found.strides
    at = tensor_maps.FAR, row + rows, tensor_maps.FAR - rows, column
    start = 2 * sum(place * stride for place, stride in zip(at, strides, strict=True))
    assert start % 2**64 == 2 * (row * width + column)
    assert [i for i in range(64) if at[2] + i < sizes[2]] == list(range(rows))
    assert strides[2:] == [width, 1]
    # The copy engine takes places and sizes of 32 bits, and strides of 40 that 16 divides.
    assert all(place < size < 2**31 for place, size in zip(at, sizes, strict=True))
    assert all(2 * stride < 2**40 and 2 * stride % 16 == 0 for stride in strides[:-1])
