"""Without a GPU warmup and doctor say so; the listener hears what is compiled."""

import sys

import pytest
import torch

import deltarule
from deltarule.cli import FAILED, main
from deltarule.models import ModelConfig, warmup_model

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to warm up for")


@no_gpu
def test_warmup_without_a_gpu_says_so() -> None:
    with pytest.raises(RuntimeError, match="no CUDA device"):
        deltarule.warmup(heads=2)
    config = ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=1, num_heads=2, layer_types="deltanet"
    )
    with pytest.raises(RuntimeError, match="no CUDA device"):
        warmup_model(config)


@no_gpu
@pytest.mark.parametrize("command", ["warmup", "doctor"])
def test_commands_without_a_gpu_say_so(command, capsys) -> None:
    assert main([command]) == FAILED
    assert "no CUDA device" in capsys.readouterr().err


@no_gpu
def test_the_doctor_without_triton_says_how_to_get_it_in_any_shell(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["doctor"]) == FAILED
    assert "extra 'gpu': pip install \"deltarule[gpu]\"" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("erase", ["tied", "free"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_after_warmup_compiles_nothing(erase, packed) -> None:
    from deltarule.ops.runtime.compilations import compilations

    shape = {"heads": 2, "head_k_dim": 64, "head_v_dim": 64, "tokens": 256, "packed": packed}
    first = deltarule.warmup(**shape, erase=erase)
    assert any(kernel.startswith("next_state") for kernel, *_ in first.compiled)
    assert deltarule.warmup(**shape, erase=erase).compiled == ()
    with compilations() as found:
        deltarule.warmup(**shape, erase=erase)
    assert not found


@pytest.mark.gpu
def test_a_model_warms_up() -> None:
    config = ModelConfig(
        vocab_size=257, hidden_size=64, num_layers=1, num_heads=2, layer_types="gated_deltanet"
    )
    assert warmup_model(config, tokens=256).seconds > 0
