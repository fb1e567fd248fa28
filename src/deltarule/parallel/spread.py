"""The one call that spreads a model over the processes of a mesh."""

from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deltarule.models import CausalLM


class Plan(NamedTuple):
    """What `parallelize` has done.

    Args:
        split: The axis along which each parameter is split over the processes of `tensor`.
        replicated: Parameters of which every process keeps all, and whose gradients
            `deltarule.parallel.sharding.sum_replicated` sums.
        stepped: Parameters that are split with an axis of steps; see `split_heads`.
        data: The mesh over which weights are sharded. None: they are not.
    """

    split: dict[str, int]
    replicated: list[nn.Parameter]
    stepped: set[str]
    data: DeviceMesh | None


def parallelize(
    model: CausalLM,
    mesh: DeviceMesh,
    *,
    bfloat16: bool = False,
    keep_gathered: bool = False,
    accumulates: bool = True,
) -> Plan:
    """Split a model's layers by heads over `tensor`, and shard its weights over the other axes.

    Every process must have drawn the same weights. Afterwards the model is called as before: each
    process of `shard` and `replicate` with rows of its own, those of `tensor` with the same. Its
    parameters are DTensors of the whole shapes under their old names; the gradients are sums over
    all rows, so divide the loss of a row by the number of all rows.

    Args:
        model: Changed in place.
        mesh: Of `make_mesh`; axes of one process do nothing.
        bfloat16: Whether the model computes under autocast to bfloat16: weights are then gathered
            in half the bytes.
        keep_gathered: Whether a block's gathered weights stay from its forward to its backward.
        accumulates: Whether gradients of several backward passes are summed before they leave.
            Without it those in bfloat16 travel in half the bytes, to the same sums in float32.

    Returns:
        What was split and what was not.

    Raises:
        ValueError: The heads or channels of a layer cannot be divided; the message names them.

    Examples:
        >>> import torch.distributed as dist
        >>> from deltarule.models import ModelConfig
        >>> from deltarule.parallel import make_mesh
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2,
        ...                              layer_types="gated_deltanet"))
        >>> parallelize(model, make_mesh("cpu")).split
        {}
        >>> dist.destroy_process_group()
    """
    # FSDP and DTensor take half a second to import, and a run on one process needs neither.
    from deltarule.parallel.heads import split_heads
    from deltarule.parallel.sharding import data_mesh, shard

    axes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    split: dict[str, int] = {}
    stepped: set[str] = set()
    if mesh["tensor"].size() > 1:
        split = split_heads(model, mesh["tensor"])
        stepped = {
            name for name in split if name in axes and model.get_parameter(name).ndim > axes[name]
        }
    data = data_mesh(mesh)
    if data.size() == 1:
        return Plan(split, [], stepped, None)
    replicated = shard(
        model, data, bfloat16=bfloat16, keep_gathered=keep_gathered, accumulates=accumulates
    )
    return Plan(split, replicated, stepped, data)
