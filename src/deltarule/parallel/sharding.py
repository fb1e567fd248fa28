"""Weights sharded over processes by FSDP2, and the two things that must know of it.

Every process computes its own rows with whole blocks, which are gathered when they are needed, and
keeps one part of the weights, of their gradients and of the optimizer's moments.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from deltarule.models import CausalLM
from deltarule.nn.experts import Experts


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes over which weights are sharded: a context is one more share of the data."""
    shards = (
        mesh["shard", "context"]._flatten("data") if mesh["context"].size() > 1 else mesh["shard"]
    )
    if mesh["replicate"].size() == 1:
        return shards
    return mesh["replicate", *(shards.mesh_dim_names or ())]


def shard(
    model: CausalLM,
    mesh: DeviceMesh,
    *,
    bfloat16: bool = False,
    keep_gathered: bool = False,
    accumulates: bool = True,
) -> list[nn.Parameter]:
    """Shard a model's weights over a mesh, block by block; they stay float32.

    With bfloat16 the weights of products travel in bfloat16, to which autocast would round them
    after the gather: half the bytes and the same numbers. Everything else of a block (gates,
    norms, taps: less than 0.1 % of it) is replicated in float32, which the layers ask for and to
    which FSDP2 would not keep. The mesh has one axis, or two: copies and shards; the rest is said
    at `parallelize`.

    Returns:
        The parameters that are replicated, whose gradients `sum_replicated` has to sum.
    """
    replicated: list[nn.Parameter] = []
    for block in model.blocks:
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": not keep_gathered}
        if bfloat16:
            # What autocast rounds: the weights of all products but those that choose experts.
            experts = [module for module in block.modules() if isinstance(module, Experts)]
            linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
            products = {id(module.weight) for module in linears}
            products -= {id(module.router.weight) for module in experts}
            products |= {id(x) for one in experts for x in (one.up_proj, one.down_proj)}
            exact = [p for p in block.parameters() if id(p) not in products]
            replicated += exact
            # The stream between blocks is float32, as under autocast: inputs are not cast.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            options |= {"mp_policy": policy, "ignored_params": set(exact)}
        fully_shard(block, **options)
        if bfloat16 and not accumulates:
            assert isinstance(block, FSDPModule)
            block.set_custom_reduce_scatter(WideSums(mesh.size(-1)))  # type: ignore[arg-type]
    # Embedding and head are needed at both ends: they stay gathered between.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=set(replicated))
    register_fsdp_forward_method(model, "hidden")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loss is divided by the rows of all processes already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return replicated


class WideSums:
    """Sums in float32 of gradients that travel in the 16 bits in which they were computed.

    FSDP2 by itself widens them before they leave, to twice the bytes and the same sums. `ways`
    processes share the sums out among them.
    """

    def __init__(self, ways: int) -> None:
        self.ways, self.sums = ways, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for all gradients, and then, in its own dtype, for the sums of this process."""
        count = math.prod(size)
        here = count == self.sums
        self.sums = 0 if here else count // self.ways
        return torch.empty(size, dtype=dtype if here else torch.bfloat16, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert output_tensor.dtype != input_tensor.dtype, "FSDP2 asked for room in another order"
        came = torch.empty_like(input_tensor)
        dist.all_to_all_single(came, input_tensor, group=group)
        torch.sum(came.view(self.ways, -1), 0, dtype=output_tensor.dtype, out=output_tensor)


def sum_replicated(replicated: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum the gradients of what every process has all of, in one collective an axis."""
    gradients = [local_part(p.grad) for p in replicated if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for axis in range(mesh.ndim):
        dist.all_reduce(flat, group=mesh.get_group(axis))
    for gradient, part in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def clip_sharded(parameters: list[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients so that their common norm is at most `largest`; return the norm before.

    It is the norm of the whole gradient, alike on every process; 0 never clips.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = sharded_norm(gradients)
    if largest > 0:
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], scale)
    return norm


def sharded_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of whole gradients of which every process has its parts, alike on all."""
    # The squares of those that are split alike are summed together.
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for x in gradients:
        layout = (x.device_mesh, x.placements) if isinstance(x, DTensor) else (None, ())
        alike[layout].append(local_part(x))
    total = torch.zeros((), device=local_part(gradients[0]).device)
    for (mesh, placements), parts in alike.items():
        square = torch.stack(list(torch._foreach_norm(parts))).square().sum()
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(axis))
        total = total + square
    return total.sqrt()


def local_part(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
