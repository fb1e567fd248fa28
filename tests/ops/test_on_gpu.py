"""The same operators on a CUDA device, against the definition in float64 on the CPU."""

import pytest
import torch

from deltarule import delta_rule, pack, recurrent_step
from deltarule.models import CausalLM, ModelConfig
from deltarule.models.loss import next_token_loss
from deltarule.nn import MIXERS
from deltarule.ops import dispatch
from oracle import DECAYS, ERASES, Case, check, make_case, on, weights, with_gradients

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Full float32 products, as PyTorch has them by default."""
    assert not torch.backends.cuda.matmul.allow_tf32


def what_cancels(case: Case) -> float:
    """Of the sum over tokens that a constant decay has as its gradient: that of absolute values."""
    if (log_decay := case.tensors["log_decay"]) is None or log_decay.ndim > 1:
        return 0.0
    q, v = case.tensors["q"], case.tensors["v"]
    every = log_decay.expand(*q.shape[:2], v.shape[2])
    exact = case.changed(log_decay=every).to(torch.float64)
    _, gradients = with_gradients(exact, "reference", *weights(case))
    return gradients["log_decay"].abs().sum((0, 1)).square().mean().sqrt().item()


@pytest.mark.parametrize("lengths", [None, (3, 0, 70, 1, 130)])
@pytest.mark.parametrize("erase", ERASES)
@pytest.mark.parametrize("decay", DECAYS)
def test_float32(decay: str, erase: str, lengths: tuple[int, ...] | None) -> None:
    case = make_case(decay, erase, tokens=200, lengths=lengths, dtype=torch.float32)
    check(case, "auto", device="cuda", cancels=what_cancels(case))


KINDS = [(decay, *e) for decay in DECAYS for e in (("none", 1), ("tied", 1), ("tied", 3))]
KINDS += [("none", "free", 1), ("head", "free", 1), ("channel", "free", 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "erase", "n_steps"), KINDS)
def test_half_precision(decay: str, erase: str, n_steps: int, dtype: torch.dtype) -> None:
    # A constant decay has one gradient for each head, and the head that decays least rules their
    # mean: many that decay alike, or one head's luck decides.
    heads, value_heads = (16, 64) if decay == "constant" else (2, 4)
    case = make_case(
        decay, erase, tokens=130, n_steps=n_steps, key_size=64, value_size=32, beta_max=1.0,
        heads=heads, value_heads=value_heads,
    )  # fmt: skip
    if decay == "constant":
        case = case.changed(log_decay=-0.4 + 0.2 * case.tensors["log_decay"])
    case = case.to(dtype)
    check(case, "auto", device="cuda", cancels=what_cancels(case))


def test_steps_beyond_the_kernel_say_so() -> None:
    q = torch.zeros(1, 1, 1, 300, device="cuda")
    state = torch.zeros(1, 1, 300, 300, device="cuda")
    with pytest.raises(ValueError, match=r"impl='triton' cannot run this.*K up to 256, got 300"):
        recurrent_step(q, q, q, beta=None, state=state, impl="triton")
    dispatch._warned.clear()
    with pytest.warns(UserWarning, match="impl='torch' on a CUDA device.*K up to 256"):
        recurrent_step(q, q, q, beta=None, state=state)


def test_offsets_may_lie_on_either_device() -> None:
    case = on("cuda", make_case("head", "tied", lengths=(5, 0, 70), dtype=torch.float32))
    x = {name: case.tensors[name] for name in case.present()}
    arguments = [x.pop(name) for name in ("q", "k", "v")]
    first = delta_rule(*arguments, **x, cu_seqlens=pack((5, 0, 70)))
    second = delta_rule(*arguments, **x, cu_seqlens=pack((5, 0, 70)).cuda())
    assert torch.equal(first.o, second.o)


@pytest.mark.filterwarnings("error:deltarule runs")
def test_one_warning_says_that_no_gpu_kernel_runs() -> None:
    dispatch._warned.clear()
    q = torch.zeros(1, 3, 1, 257, device="cuda")
    with pytest.warns(UserWarning, match="the Triton kernels take K up to 256"):
        delta_rule(q, q, q, beta=None)
    delta_rule(q, q, q, beta=None)


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_models_train_and_generate(mixer: str) -> None:
    config = ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=2, layer_types=mixer, num_heads=2,
        window=16 if MIXERS[mixer].takes("window") else None,
    )  # fmt: skip
    model = CausalLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(257, (1, 101), device="cuda")
    offsets = pack([40, 60]).cuda()
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            logits, _ = model(tokens[:, :-1], cu_seqlens=offsets)
        loss = next_token_loss(logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    prompts = [tokens[0, :20].tolist(), tokens[0, :3].tolist(), []]
    together = model.generate(prompts, max_new_tokens=8, temperature=0)
    assert together == [model.generate([p], max_new_tokens=8, temperature=0)[0] for p in prompts]
