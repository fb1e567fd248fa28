"""What holds in every test: poisoned allocations, fixed seeds, reproducible examples."""

import importlib.util
import os
import random
import signal
from collections.abc import Callable, Iterator

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

import gpus
import parts
from left_patched import unpatched

SEED = 0

gpus.spread()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job in the background of a shell, from whose tests Ctrl-C would not be heard.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # Read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """Fresh memory holds NaN (integers: the least value), so that reading it unwritten is seen."""
    # It keeps the functions that `with torch.device("meta")` acts on: they must be the originals.
    _device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        patch.setattr(Tensor, "new_empty", new_poisoned)
        yield


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The allocator, followed by a fill."""

    def allocate_and_poison(*args: object, **options: object) -> Tensor:
        fresh = allocate(*args, **options)
        if fresh.layout == torch.strided and not fresh.is_quantized:
            fresh.detach().fill_(poison(fresh.dtype))
        return fresh

    return allocate_and_poison


def new_poisoned(self: Tensor, *size: object, **options: object) -> Tensor:
    """`new_empty` by way of `new_full`: torch.compile cannot follow a call of the original."""
    size = size or (options.pop("size"),)
    shape = size if isinstance(size[0], int | torch.SymInt) else size[0]
    return self.new_full(shape, poison(options.get("dtype") or self.dtype), **options)


def poison(dtype: torch.dtype) -> float | int | bool:
    """NaN where the type has one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


@pytest.fixture(scope="session", autouse=True)
def addresses_inside() -> Iterator[None]:
    """What an interpreted kernel reads and writes lies in the tensors that it was given."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    # It reads the variable above when it is imported.
    from bounds import checked_addresses

    with checked_addresses():
        yield


@pytest.fixture(autouse=True)
def models_unpatched() -> Iterator[None]:
    """A test that leaves a model of transformers patched fails, not those that come after it."""
    yield
    left = unpatched()
    assert not left, "the test ends with a patch that was not taken back: use `with patch(model):`"


class TorchSeed:
    """PyTorch's generator in the form in which hypothesis seeds and restores `random`."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# hypothesis keeps a weak reference only.
TORCH_SEED = TorchSeed()
hypothesis.register_random(TORCH_SEED)
hypothesis.settings.register_profile("deltarule", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("deltarule")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what the default run leaves out."""
    if (part := parts.part_of(item)) is not None:
        item.add_marker(part)
    if item.get_closest_marker("gpu"):
        # Said once in a process: whichever test came first would fail of it.
        item.add_marker(pytest.mark.filterwarnings("ignore:deltarule runs impl="))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU, tests of one configuration side by side: a process compiles its kernels once."""
    if torch.cuda.is_available():
        items.sort(key=lambda item: item.callspec.id if hasattr(item, "callspec") else "")


# First of all set-up, so that fixtures draw from the fixed seed too.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 (libraries draw from the global generator)
    torch.manual_seed(SEED)
