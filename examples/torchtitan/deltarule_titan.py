"""deltarule's models in torchtitan 0.3: model, parallelize, names of weights, a config to train.

    deltarule data SOURCE --out tokens
    PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 8 -m torchtitan.train \
        --module deltarule_titan --config gated_deltanet --hf_assets_path .

Checkpoints, metrics, profiles and schedules are torchtitan's; its clipping takes weights of one
mesh alone, so heads or a sequence over GPUs need `deltarule train text --tensor`, `--context`.
"""

from dataclasses import dataclass, field
from typing import Any

import token_rows
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

from deltarule.models import CausalLM, ModelConfig
from deltarule.parallel.sharding import shard


class TitanLM(BaseModel):
    """A CausalLM that takes torchtitan's rows and positions."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        fields: dict[str, Any] = field(default_factory=dict)

        def update_from_config(self, *, config: Any, **_: Any) -> None: ...

        def get_nparams_and_flops(self, model: torch.nn.Module, _: int) -> tuple[int, int]:
            return (count := sum(p.numel() for p in model.parameters())), 6 * count

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.autocast, self.lm = False, CausalLM(ModelConfig(**config.fields))

    def verify_module_protocol(self) -> None: ...

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """The weights that one process would draw; each keeps its part."""
        with torch.device("cpu"), torch.random.fork_rng():
            torch.manual_seed(0)
            drawn = CausalLM(self.lm.config).state_dict()
        for name, p in [*self.lm.named_parameters(), *self.lm.named_buffers()]:
            own = drawn[name].to(p.device, p.dtype)
            if isinstance(p, DTensor):
                own = distribute_tensor(own, p.device_mesh, p.placements, src_data_rank=None)
            p.data.copy_(own)

    def forward(self, tokens: Tensor, *, positions: Tensor, attention_masks: Any = None) -> Tensor:
        """Logits [B, T, vocab]; a document begins where its position is zero."""
        first = torch.nonzero(positions.flatten() == 0).flatten()
        offsets = torch.cat([first, first.new_tensor([tokens.numel()])]).to(torch.int32)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            return self.lm(tokens.reshape(1, -1), cu_seqlens=offsets)[0].view(*tokens.shape, -1)


def parallelize(model: TitanLM, *, parallel_dims: Any, **given: Any) -> TitanLM:
    """Shard block by block; weights travel in float32, products are in the precision asked for."""
    if parallel_dims.tp_enabled or parallel_dims.cp_enabled or parallel_dims.pp_enabled:
        raise ValueError("only data parallelism works here: see deltarule train text --tensor")
    model.lm.activation_checkpointing = given["ac_config"] is not None
    model.autocast = given["training"].mixed_precision_param == "bfloat16"
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    shard(model.lm, parallel_dims.get_mesh(axes))
    return model


class Names(StateDictAdapter):
    # A Hugging Face checkpoint of this model is that of `CausalLM.save`.
    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("lm."): x for name, x in state_dict.items()}

    def from_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"lm.{name}": x for name, x in state_dict.items()}


def gated_deltanet(flavor: str = "340m", data: str = "tokens", **fields: Any) -> Trainer.Config:
    """Gated DeltaNet on the token shards of `deltarule data`."""
    sizes = {"hidden_size": 1024, "num_layers": 24, "num_heads": 6, "layer_types": "gated_deltanet"}
    rows = token_rows.Rows.Config(data=data)
    model = TitanLM.Config(fields=sizes | {"vocab_size": rows.vocab_size()} | fields)
    spec = ModelSpec("deltarule", flavor, model, parallelize, None, None, Names)
    # The offsets of documents change from row to row: no CUDA graphs.
    training = TrainingConfig(seq_len=4096, steps=1000, disable_cuda_graphs=True)
    return Trainer.Config(
        model_spec=spec, loss=CrossEntropyLoss.Config(), dataloader=rows,
        tokenizer=token_rows.NoText.Config(), optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=100), training=training,
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )  # fmt: skip
