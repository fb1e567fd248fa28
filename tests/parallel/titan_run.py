"""torchtitan's own trainer on CPUs: what it asks of a GPU is answered here.

    torchrun --nproc-per-node 2 titan_run.py [torchtitan's flags]

Run by `test_titan.py` in a folder with `tokens`; prints the versions, then torchtitan's lines.
"""

import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/torchtitan"))
import deltarule_titan
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import TrainingConfig
from torchtitan.train import main
from torchtitan.trainer import Trainer

HEADS = {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 16}


def debug() -> Trainer.Config:
    """A model for seconds."""
    config = deltarule_titan.gated_deltanet(
        "debug", hidden_size=48, num_layers=2, layer_types=("gated_deltanet", "attention"), **HEADS
    )
    config.dataloader.length = 64
    config.training = TrainingConfig(
        local_batch_size=2, global_batch_size=4, seq_len=128, steps=8, disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )  # fmt: skip
    config.metrics = MetricsProcessor.Config(log_freq=1)
    return config


def pretend_cpu() -> None:
    """Answer for a GPU's name, memory and graphs."""
    properties = types.SimpleNamespace(total_memory=2**34, name="CPU")
    answers: dict[str, Any] = {
        "set_device": None, "get_device_name": "CPU", "current_device": 0, "synchronize": None,
        "get_device_properties": properties, "reset_peak_memory_stats": None, "empty_cache": None,
        "memory_stats": {}, "device_count": 0, "is_available": False,
    }  # fmt: skip
    module = types.SimpleNamespace(
        **{name: lambda *_, answer=answer: answer for name, answer in answers.items()},
        manual_seed=torch.manual_seed,
    )
    for name, loaded in list(sys.modules.items()):
        for attribute, value in (("device_module", module), ("device_type", "cpu")):
            if name.startswith("torchtitan") and hasattr(loaded, attribute):
                setattr(loaded, attribute, value)
    if not hasattr(torch.distributed, "set_timeout"):
        # torchtitan 0.3.0 calls it after the first step; torch 2.13.0 does not have it.
        torch.distributed.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]
    barrier = torch.distributed.barrier

    def without_device(*given: Any, **options: Any) -> Any:
        options.pop("device_ids", None)
        return barrier(*given, **options)

    torch.distributed.barrier = without_device


if __name__ == "__main__":
    print(f"torch {torch.__version__}, torchtitan {importlib.metadata.version('torchtitan')}")
    pretend_cpu()
    sys.modules["titan_run"] = sys.modules["__main__"]
    sys.argv[1:1] = ["--module", "titan_run", "--config", "debug", "--hf_assets_path", "."]
    main()
