"""Models and runs of text that take a second on a CPU, and runs that die in the middle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deltarule.models import CausalLM, ModelConfig
from deltarule.train.job import ModelOptions
from deltarule.train.loop import LoopOptions, Trainer
from deltarule.train.text import TextRun

# The same run on the command line.
FLAGS = [
    *("--length", "16", "--batch-tokens", "64", "--long-length", "32", "--sample-bytes", "5"),
    *("--hidden-size", "16", "--num-layers", "1", "--num-heads", "1", "--mlp-size", "16"),
    *("--validation-bytes", "500", "--evaluate-every", "0"),
]


def small_model(*layers: str, **options: Any) -> CausalLM:
    """Layers of 16 channels, on fixed weights; none named is a Gated DeltaNet."""
    layers = layers or ("gated_deltanet",)
    sizes = {"vocab_size": 257, "hidden_size": 16, "num_heads": 1, "num_layers": len(layers)}
    torch.manual_seed(0)
    return CausalLM(ModelConfig(**sizes | {"layer_types": layers} | options))


def small_run(data: Path, runs: Path, **options: Any) -> TextRun:
    """Six steps on a text."""
    defaults = {
        "length": 32, "batch_tokens": 128, "long_length": 64, "sample_bytes": 4,
        "model": ModelOptions(num_layers=1, hidden_size=16, num_heads=1, mlp_size=16),
        "loop": LoopOptions(steps=6, save_every=3, evaluate_every=3, device="cpu"),
    }  # fmt: skip
    return TextRun(data=str(data), runs=runs, **defaults | options)


class Stop(Exception):
    """What a test raises in the middle of a run."""


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch, train: Callable[[], object]) -> None:
    """Train until so many steps are done; no handler of the library sees what comes then."""

    def die(trainer, metrics, progress, update=Trainer._step):
        if trainer.step == step:
            raise Stop
        update(trainer, metrics, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", die)
        with pytest.raises(Stop):
            train()
