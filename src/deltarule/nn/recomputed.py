"""Tensors that the backward pass computes again, rather than keeping them until then.

A norm's output is cheap to compute and as large as its input, which is kept anyway. Whoever saves
it for the backward inside `recomputed` is given a note instead; the first that reads its note has
the tensor computed, and the last lets it go.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

# Contexts that running modules have put around their layers, the innermost last: a recipe that is
# made inside of one is followed inside of it.
SURROUNDINGS: list[Callable[[], AbstractContextManager[None]]] = []
# Bytes of a tensor that is worth it: notes cost the host time, whatever the size.
LEAST = 2**25
NOTHING = nullcontext()
Saved = Tensor | tuple["Recipe", torch.Size]
# A tensor, and what computes it again.
Computed = tuple[Tensor, Callable[[], Tensor]]


class Recipe:
    """How one tensor is computed again, known by where it lies while others may save it."""

    def __init__(self, x: Tensor, compute: Callable[[], Tensor]) -> None:
        self.x: Tensor | None = x
        self.compute = compute
        # The backward pass runs outside the forward's autocast.
        kind = x.device.type
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.surrounding = SURROUNDINGS[-1] if SURROUNDINGS else nullcontext
        self.readers = self.left = 0

    def read(self) -> Tensor:
        """Compute the tensor for its first reader; the others share it."""
        if self.x is None:
            kind, _, enabled = self.autocast
            # The forward's autocast, where there is any then or now.
            anywhere = enabled or torch.is_autocast_enabled(kind)
            autocast = torch.autocast(*self.autocast) if anywhere else nullcontext()
            with torch.no_grad(), autocast, self.surrounding():
                self.x = self.compute()
            self.left = self.readers
        x, self.left = self.x, self.left - 1
        if not self.left:
            self.x = None
        return x


class Pack:
    """What autograd calls with each tensor that is saved: the recipes that are open, by place."""

    def __init__(self, recipes: dict[int, Recipe]) -> None:
        self.recipes = recipes

    def __call__(self, x: Tensor) -> Saved:
        recipe = self.recipes.get(x.data_ptr())
        if recipe is None or (made := recipe.x) is None:
            return x
        # x begins where the tensor does: is it all of it, if in another shape?
        if x.dtype != made.dtype or x.numel() != made.numel() or not x.is_contiguous():
            return x
        recipe.readers += 1
        return recipe, x.shape


def unpack(saved: Saved) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    recipe, shape = saved
    return recipe.read().view(shape)


def recomputed(*tensors: Computed) -> AbstractContextManager[None]:
    """Within, autograd saves of contiguous tensors only how to compute them again.

    Each comes with what gives the same numbers again, in the same layout, from tensors that are
    kept. Where something else decides what autograd saves (activation checkpointing, a compiler,
    hooks of the user's), this does nothing. Neither does it for small tensors, nor on a CPU, whose
    arithmetic costs more than its memory.
    """
    # To a compiler sizes are no numbers.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return NOTHING
    large = [pair for pair in tensors if pair[0].requires_grad and pair[0].nbytes >= LEAST]
    able = large and large[0][0].is_cuda and hooks_are_free()
    return remembered(*large) if able else NOTHING


@contextmanager
def remembered(*tensors: Computed) -> Iterator[None]:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer = top[0].recipes if top is not None and isinstance(top[0], Pack) else {}
    recipes = {x.data_ptr(): Recipe(x, compute) for x, compute in tensors}
    pack = Pack({**outer, **recipes})
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for recipe in recipes.values():
            recipe.x = None


def hooks_are_free() -> bool:
    """Whether no other hooks or transform decide what autograd saves."""
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if torch._C._are_functorch_transforms_active() or not enabled:
        return False
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is None or isinstance(top[0], Pack)
