"""A training step as one call: the numbers of the loop written out, skipped where not finite."""

import contextlib
import copy
import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deltarule.models import CausalLM, linear_next_token_loss
from deltarule.nn.linears import adjoin
from deltarule.ops.runtime.capture import capturing
from deltarule.train.optimizer import OptimizerOptions, make_optimizer
from deltarule.train.step import MOST, WARM_UP, Captured, TrainingStep, set_rate
from small import small_model

CLIP = 0.5


def built(device: str = "cpu", layer_types: object = "gated_deltanet") -> CausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    return small_model(layer_types=layer_types, **sizes).to(device)


def loss_of(model: CausalLM):
    def loss(tokens: torch.Tensor, *offsets: torch.Tensor) -> torch.Tensor:
        x, _ = model.hidden(tokens[:, :-1], cu_seqlens=offsets[0] if offsets else None)
        value = linear_next_token_loss(x, model.embedding.weight, tokens[:, 1:])
        return torch.stack([value, value.detach() * 2])

    return loss


def rows(step: int, part: int = 0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(64, (2, 33), generator=generator).to(device)


def test_a_step_is_the_loop_written_out():
    model, options = built(), OptimizerOptions(lr=1e-2)
    other = copy.deepcopy(model)
    step = TrainingStep(loss_of(model), make_optimizer(model, options), clip=CLIP)
    optimizer = make_optimizer(other, options)
    for index in range(4):
        parts = [[rows(index, part)] for part in range(3)]
        report = step(*parts)
        values = [loss_of(other)(*part)[0] for part in parts]
        for value in values:
            (value / 3).backward()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, torch.inf)
        optimizer.grad_scale = ((norm + 1e-6) / CLIP).clamp(min=1)
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        optimizer.zero_grad()
        mean = sum(value.item() for value in values) / 3
        assert report.tolist() == pytest.approx([mean, float(norm), 2 * mean], rel=1e-6)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("largest", [0.0, 1e-3, 1e3])
def test_gradients_are_clipped_to_their_common_norm(largest):
    model = built().double()
    other = copy.deepcopy(model)
    step = TrainingStep(
        lambda x: loss_of(model)(x), torch.optim.SGD(model.parameters(), lr=1.0, fused=True),
        clip=largest,
    )  # fmt: skip
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    step([rows(0)])
    loss_of(other)(rows(0))[0].backward()
    nn.utils.clip_grad_norm_(other.parameters(), largest or torch.inf)
    optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)


def test_a_step_that_is_not_finite_changes_nothing():
    model = built()
    optimizer = make_optimizer(model, OptimizerOptions(lr=1e-2))
    factor = torch.ones(())
    step = TrainingStep(lambda x: loss_of(model)(x) * factor, optimizer, clip=CLIP)
    step([rows(0)])
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    factor.fill_(math.inf)
    assert not step([rows(1)])[0].isfinite()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name])
    for index, kinds in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, before[1][index][kind]) for kind, tensor in kinds.items())
    factor.fill_(1.0)
    assert step([rows(1)]).isfinite().all()
    assert not torch.equal(model.norm.weight, before[0]["norm.weight"])
    # An optimizer that cannot skip a step is refused.
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], foreach=True)
    with pytest.raises(ValueError, match="fused=True"):
        TrainingStep(torch.sum, optimizer)


def test_no_garbage_is_collected_within_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    with contextlib.suppress(KeyError), capturing(None):
        seen = [gc.isenabled()]
        raise KeyError
    # As of two threads, of which the first to begin is the first to end.
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    seen.append(gc.isenabled())
    for stack in (first, second):
        stack.enter_context(capturing(None))
    first.close()
    seen.append(gc.isenabled())
    second.close()
    assert [*seen, gc.isenabled()] == [False, True, False, True]


@pytest.fixture
def captures(monkeypatch):
    """Parts of each capture of a step that has no GPU; a replay does nothing."""
    found = []

    def capture(self, parts):
        found.append(parts)
        graph = SimpleNamespace(replay=lambda: None)
        return Captured(graph, [[x.clone() for x in part] for part in parts], torch.zeros(2))

    monkeypatch.setattr(TrainingStep, "aside", TrainingStep.eager)
    monkeypatch.setattr(TrainingStep, "capture", capture)
    return found


def test_frozen_weights_that_were_laid_elsewhere_need_another_graph(captures):
    frozen = [nn.Linear(4, 4, bias=False).requires_grad_(False) for _ in range(2)]
    weight = nn.Parameter(torch.ones(4))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return sum(module(weight * x).sum() for module in frozen)

    step = TrainingStep(loss, torch.optim.AdamW([weight], fused=True))
    step.graphs = True
    for count in (1, 2):
        for _ in range(WARM_UP + 2):
            step([torch.ones(4)])
        assert len(captures) == count
        # As generation does, beside the training of an adapter.
        adjoin(frozen)


def test_steps_of_growing_lengths_leave_the_first_graphs_behind(captures):
    weight = nn.Parameter(torch.ones(1))
    step = TrainingStep(lambda x: (weight * x).sum(), torch.optim.AdamW([weight], fused=True))
    step.graphs = True

    def captured_after(steps: int, length: int) -> int:
        for _ in range(steps):
            step([torch.ones(length)])
        return len(captures)

    for length in range(1, MOST + 3):
        assert captured_after(WARM_UP + 3, length) == length
    assert len(step.captured) == MOST
    # The newest are there still; the first, should they come again, are as new.
    assert captured_after(1, MOST + 2) == captured_after(1, 3) == MOST + 2
    assert captured_after(WARM_UP, 1) == MOST + 2
    assert captured_after(1, 1) == MOST + 3
    # The one that went for it is the one that was not replayed for the longest time.
    assert captured_after(1, 3) == MOST + 3
    assert captured_after(WARM_UP + 1, 4) == MOST + 4


def packed(index):
    """A row of documents whose offsets change."""
    cuts = [0, 7 + index, 7 + index, 40 - index, 65, 65]
    return [rows(index, device="cuda").reshape(1, -1), torch.tensor(cuts, device="cuda")]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [0, 1, 2], ids=["packed", "one", "two"])
@pytest.mark.parametrize("name", ["gated_deltanet", "attention", ("kda", "sliding_window")])
def test_graphs_have_the_bits_of_eager_steps(name, parts):
    models = [built("cuda", name) for _ in range(2)]
    reports = []
    for model, graphs in zip(models, (False, True), strict=True):
        optimizer = make_optimizer(model, OptimizerOptions(lr=1e-2))
        step = TrainingStep(loss_of(model), optimizer, clip=CLIP, cuda_graphs=graphs)
        told = []
        for index in range(WARM_UP + 5):
            set_rate(optimizer, 1e-2 / (index + 1))
            given = [[rows(index, part, "cuda")] for part in range(parts)] or [packed(index)]
            with torch.autocast("cuda", torch.bfloat16):
                told.append(step(*given))
        assert len(step.captured) == int(graphs)
        reports.append(torch.stack(told))
    assert torch.equal(*reports)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
