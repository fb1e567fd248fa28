"""Layers split by heads, MLPs by channels, the vocabulary by tokens: tensor parallelism.

The plan is not written down anywhere: the block of one process is a block with fewer heads. It is
built without memory, and wherever a parameter of it is smaller than the whole model's, that axis
is split; where it is as large, every process keeps all of it.
"""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from deltarule.models import CausalLM, ModelConfig
from deltarule.models.block import Block, mlp_size
from deltarule.nn import Attention, LatentAttention, Mixer
from deltarule.nn.experts import Experts
from deltarule.parallel.local import Enclosure
from deltarule.parallel.spanning import span_heads
from deltarule.parallel.vocabulary import split_vocabulary

HEADS = ("num_heads", "num_v_heads", "num_attention_heads", "num_kv_heads")
# Of these the rows of each step come one after the other, and each step has all heads.
STEPPED = ("k_proj", "v_proj", "b_proj", "k_conv", "v_conv")


def split_heads(model: CausalLM, mesh: DeviceMesh) -> dict[str, int]:
    """Split a model in place over a mesh of one axis; each process keeps some of the heads.

    Every process must hold the same weights before. Afterwards the split parameters are DTensors
    under their old names, and the model is called as before, with the same tokens everywhere.
    Returned is the axis along which each parameter and buffer is split, without those that are not.
    """
    plan: dict[str, int] = {}
    # All are built first: a size that cannot be split is refused before anything is changed.
    blocks = []
    for index, block in enumerate(model.blocks):
        if not isinstance(block.mixer, Mixer):
            raise ValueError(
                f"block {index} of {model.config.layer_types[index]!r} cannot be split by heads: "
                "its first half must be one mixer; shard the weights instead"
            )
        blocks.append(local_block(model.config, index, block.mixer, mesh.size()))
    for index, (block, local) in enumerate(zip(model.blocks, blocks, strict=True)):
        for name in ("mixer", "mlp"):
            whole, part = getattr(block, name), getattr(local, name)
            if whole is not None:
                axes = split_part(whole, part, mesh)
                plan |= {f"blocks.{index}.{name}.{key}": axis for key, axis in axes.items()}
                setattr(block, name, part)
    return plan | split_vocabulary(model, mesh)


def local_block(config: ModelConfig, index: int, mixer: Mixer, ways: int) -> Block:
    """Build the block of one process, without memory: fewer heads of the same sizes."""
    split = {name: getattr(config, name) for name in (*HEADS, "shared_expert_intermediate_size")}
    split["mlp_size"] = mlp_size(config)
    changed: dict[str, Any] = {
        name: share(name, x, ways) for name, x in split.items() if x is not None
    }
    changed |= {name: getattr(mixer, name, None) for name in ("head_k_dim", "head_v_dim")}
    check_splits(config, mixer, ways)
    if isinstance(mixer, Attention):
        # As many channels of a head as before, whatever they came from.
        heads = {"num_attention_heads": mixer.num_heads, "num_kv_heads": mixer.num_kv_heads}
        changed |= {name: share(name, x, ways) for name, x in heads.items()}
        changed["attention_head_dim"] = mixer.head_dim
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        block = Block(dataclasses.replace(config, **changed), index)
    if isinstance(block.mlp, Experts):
        # One process has its share of the experts; the router chooses among all.
        count = share("num_experts", block.mlp.num_experts, ways)
        for name in ("up_proj", "down_proj"):
            whole = block.mlp.get_parameter(name)
            block.mlp.register_parameter(name, nn.Parameter(whole[:count].detach()))
    return block


def check_splits(config: ModelConfig, mixer: Mixer, ways: int) -> None:
    """Refuse a layer of which no process can have some of the heads."""
    norm_of_all = isinstance(mixer, Attention) and mixer.attention_qk_norm == "all"
    some = ", each of which has some of the heads"
    reasons = {
        f"kv_lora_rank={config.kv_lora_rank}": (
            isinstance(mixer, LatentAttention), ", which share one head of keys",
        ),
        mixer.rule.name: (ways > 1 and not mixer.heads_alone, some),
        f"n_groups={config.n_groups}": (config.n_groups > 1, ""),
        "attention_qk_norm='all'": (norm_of_all, some),
    }  # fmt: skip
    for name, (holds, why) in reasons.items():
        if holds:
            raise ValueError(
                f"{name} cannot be split over {ways} processes{why}: shard the weights instead"
            )


def share(name: str, value: int, ways: int) -> int:
    """What one process has of a number of heads or channels."""
    if value % ways:
        raise ValueError(
            f"{name}={value} cannot be split over {ways} processes: choose a tensor size that "
            f"divides it, or change {name}"
        )
    return value // ways


def split_part(whole: nn.Module, local: nn.Module, mesh: DeviceMesh) -> dict[str, int]:
    """Give the layer of one process its part of each tensor; return the axes that are split."""
    axes, steps, stepped = {}, getattr(whole, "n_steps", 1), set()
    parts = dict([*local.named_parameters(), *local.named_buffers()])
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        size, part, value = tensor.shape, parts[name].shape, tensor.detach()
        smaller = [i for i, (a, b) in enumerate(zip(size, part, strict=True)) if a != b]
        if smaller:
            axis = axes[name] = smaller[0]
            if len(smaller) > 1 or size[axis] != mesh.size() * part[axis]:
                raise ValueError(
                    f"{name} is {list(size)} and would be {list(part)} on each of {mesh.size()} "
                    "processes: this layer cannot be split by heads"
                )
            if steps > 1 and name.split(".")[0] in STEPPED:
                # An axis of its own: a strided split of the rows would come out in another order
                # where they are sharded once more, and in a checkpoint.
                stepped.add(name)
                value, axis = value.unflatten(0, (steps, -1)), 1
            # Every process has the whole tensor: nothing is sent.
            value = distribute_tensor(value, mesh, [Shard(axis)], src_data_rank=None)
        # A parameter or a buffer, as the one that it comes from was.
        path, _, last = name.rpartition(".")
        owner = local.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            owner._parameters[last] = nn.Parameter(value, requires_grad=tensor.requires_grad)
        else:
            owner._buffers[last] = value
    local.train(whole.training)
    if hasattr(whole, "save_states"):
        local.save_states = whole.save_states
    span_heads(local, whole, mesh)
    Enclosure(local, mesh.get_group(), stepped)
    return axes
