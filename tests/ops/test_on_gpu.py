"""The same operators on a CUDA device, against the definition in float64 on the CPU."""

import pytest
import torch

from deltarule import delta_rule, pack
from deltarule.models import CausalLM, ModelConfig
from deltarule.models.loss import next_token_loss
from deltarule.nn import MIXERS
from deltarule.ops import dispatch
from deltarule.reference import chunked
from oracle import DECAYS, ERASES, Case, make_case, run_module, weights, with_gradients
from tolerance import assert_close, assert_close_to_yardstick

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:deltarule runs impl='torch' on a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Full float32 products, as PyTorch has them by default."""
    assert not torch.backends.cuda.matmul.allow_tf32


def on_gpu(case: Case) -> Case:
    return case.changed(**{name: case.tensors[name].cuda() for name in case.present()})


@pytest.mark.parametrize("lengths", [None, (3, 0, 70, 1, 130)])
@pytest.mark.parametrize("erase", ERASES)
@pytest.mark.parametrize("decay", DECAYS)
def test_float32(decay: str, erase: str, lengths: tuple[int, ...] | None) -> None:
    case = make_case(decay, erase, tokens=200, lengths=lengths, dtype=torch.float32)
    d_o, d_state = (x.float() for x in weights(case))
    out, gradients = with_gradients(on_gpu(case), "auto", d_o.cuda(), d_state.cuda())
    exact, expected = with_gradients(
        case.to(torch.float64), "reference", d_o.double(), d_state.double()
    )
    assert_close(out.o, exact.o, dtype=torch.float32, name="o")
    assert_close(out.final_state, exact.final_state, dtype=torch.float32, name="final_state")
    for name, gradient in gradients.items():
        assert gradient.is_cuda
        assert_close(gradient, expected[name], dtype=torch.float32, gradient=True, name=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("decay", "erase"), [("head", "tied"), ("channel", "free")])
def test_half_precision(decay: str, erase: str, dtype: torch.dtype) -> None:
    case = make_case(decay, erase, tokens=130, beta_max=1.0).to(dtype)
    exact = case.to(torch.float64).run("reference")
    yardstick = run_module(chunked, case, chunk_size=64, matmul_dtype=dtype)
    out = on_gpu(case).run("auto")
    assert_close_to_yardstick(out.o, exact.o, yardstick.o)


def test_offsets_may_lie_on_either_device() -> None:
    case = on_gpu(make_case("head", "tied", lengths=(5, 0, 70), dtype=torch.float32))
    x = {name: case.tensors[name] for name in case.present()}
    arguments = [x.pop(name) for name in ("q", "k", "v")]
    first = delta_rule(*arguments, **x, cu_seqlens=pack((5, 0, 70)))
    second = delta_rule(*arguments, **x, cu_seqlens=pack((5, 0, 70)).cuda())
    assert torch.equal(first.o, second.o)


@pytest.mark.filterwarnings("error:deltarule runs")
def test_one_warning_says_that_no_gpu_kernel_runs() -> None:
    dispatch._warned.clear()
    q = torch.zeros(1, 3, 1, 2, device="cuda")
    with pytest.warns(UserWarning, match="no GPU kernels"):
        delta_rule(q, q, q, beta=None)
    delta_rule(q, q, q, beta=None)


@pytest.mark.parametrize("mixer", list(MIXERS))
def test_models_train_and_generate(mixer: str) -> None:
    config = ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=2, layer_types=mixer, num_heads=2, window=16
    )
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
