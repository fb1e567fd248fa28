from collections.abc import Callable

import pytest
import torch

from deltarule.models import CausalLM
from deltarule.models import decoder as decoding
from models.checkpoints import small_config


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_model() -> Callable[..., CausalLM]:
    """Build a small model with fixed parameters; its embedding is large, to tell tokens apart."""

    def make(**changes: object) -> CausalLM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = CausalLM(small_config(**changes))
            torch.nn.init.normal_(model.embedding.weight, std=0.15)
        return model

    return make


@pytest.fixture
def random_tokens() -> Callable[..., torch.Tensor]:
    def make(*shape: int, seed: int = 0, vocab_size: int = 257) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocab_size, shape, generator=generator)

    return make


@pytest.fixture
def on_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of graphs on a CPU too, where the same code runs without a capture."""
    if not torch.cuda.is_available():
        name = "deltarule.models.generate.captured_parameters"
        monkeypatch.setattr(name, lambda model: tuple(model.parameters()))
        monkeypatch.setattr(decoding.Decoder, "capture", lambda self, model: self.advance(model))
        monkeypatch.setattr(decoding, "record", lambda *given: None)
