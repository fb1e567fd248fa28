"""Wrong arguments are named, with what was given and what was expected."""

from functools import partial

import pytest
import torch

from deltarule import attention_matrix, delta_rule, dplr, explain, pack, recurrent_step
from deltarule.models import CausalLM, ModelConfig
from deltarule.nn import DeltaNet
from oracle import make_case

GOOD = make_case("head", "tied", tokens=10, dtype=torch.float32).tensors


def call(**changes):
    arguments = {name: x for name, x in GOOD.items() if name not in ("a", "b")} | changes
    return delta_rule(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": GOOD["q"][0]}, r"q must have 4 axes .* got \[10, 2, 8\]"),
        ({"q": GOOD["q"].long()}, "q must be float64.*got torch.int64"),
        ({"q": [1.0]}, "q must be a tensor \\[B, T, heads, channels\\], got list"),
        ({"k": GOOD["k"].double()}, "k is torch.float64 on cpu, but q is torch.float32"),
        ({"k": GOOD["k"][:, :9]}, r"k must be \[B, T\*n, H, K\] = \[2, 10, 2, 8\]"),
        ({"n_steps": 2}, r"k must be .* = \[2, 20, 2, 8\] .*n_steps=2"),
        ({"n_steps": 0}, "n_steps must be an integer of 1 or more, got 0"),
        ({"n_steps": True}, "n_steps must be an integer"),
        ({"normalize_qk": "none"}, "normalize_qk must be True or False, got 'none'"),
        ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
        ({"scale": "a"}, "scale must be a number or None, got str"),
        ({"scale": torch.ones(())}, "scale must be a number .* multiply q"),
        ({"v": GOOD["v"][:, :, :3]}, "v must have a multiple of the 2 heads .* got 3"),
        ({"v": GOOD["v"][:1]}, r"v must start with \[B, T\*n\] = \[2, 10\]"),
        (
            {"beta": GOOD["beta"][..., 0]},
            r"beta must be \[B, T\*n, HV\] = \[2, 10, 4\], got \[2, 10\]",
        ),
        ({"beta": 0.5}, "beta must be a tensor or None, got float"),
        ({"log_decay": GOOD["log_decay"].bfloat16()}, "log_decay must be float32.*bfloat16"),
        ({"log_decay": GOOD["log_decay"][:1]}, r"log_decay must be \[HV\] = \[4\] or \[B, T, HV\]"),
        ({"initial_state": GOOD["initial_state"].mT}, r"initial_state must be \[N, HV, V, K\]"),
        ({"initial_state": GOOD["initial_state"].half()}, "initial_state must be torch.float32"),
        ({"cu_seqlens": pack([10])}, "cu_seqlens packs .* B must be 1, got 2"),
        (
            {"impl": "fast"},
            "impl must be one of 'auto', 'triton', 'gluon', 'torch', 'reference', got 'fast'",
        ),
    ],
)
def test_delta_rule_names_the_argument(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


OTHERS = {
    "sparse": (lambda x: x.to_sparse(), "to_dense"),
    "sparse_csr": (lambda _: torch.eye(3).to_sparse_csr(), "to_dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), "cu_seqlens"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x.view(-1), x.view(-1)[:1]], layout=torch.jagged),
        "cu_seqlens",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "dequantize"
    ),
    "meta": (lambda x: x.to("meta"), "meta"),
    "complex": (lambda x: x.to(torch.complex64), "complex64"),
    "array": (lambda x: x.numpy(), "got ndarray"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "log_decay", "initial_state"])
def test_tensors_that_are_not_dense_are_named_in_one_line(name: str, kind: str) -> None:
    make, says = OTHERS[kind]
    with pytest.raises(ValueError, match=says) as caught:
        call(**{name: make(GOOD[name])})
    assert str(caught.value).count("\n") == 0
    # Of q on another device, the first that is not there is named.
    assert str(caught.value).startswith("k is" if (name, kind) == ("q", "meta") else name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "meta"])
def test_layers_and_models_name_them_too(kind: str) -> None:
    make, says = OTHERS[kind]
    with pytest.raises(ValueError, match=rf"x must .*{says}|x must have 3 axes"):
        DeltaNet(32, num_heads=2)(make(torch.randn(2, 3, 32)))
    config = ModelConfig(
        vocab_size=9, hidden_size=32, num_layers=1, num_heads=2, layer_types="deltanet"
    )
    with pytest.raises(ValueError, match=r"^tokens must "):
        CausalLM(config)(make(torch.ones(2, 3, dtype=torch.long)))
    with pytest.raises(ValueError, match=r"^(v|q) (must|is) "):
        attention_matrix(make(GOOD["q"]), make(GOOD["k"]), beta=None)
    pool = torch.zeros(3, *GOOD["initial_state"].shape[1:])
    short = {name: GOOD[name][:, :1] for name in ("q", "k", "v", "beta")}
    for name, x in {"state": pool, "state_indices": torch.tensor([0, 1])}.items():
        options = {"state": pool, "state_indices": torch.tensor([0, 1]), name: make(x)}
        with pytest.raises(ValueError, match=f"^{name} must "):
            recurrent_step(**short, **options)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([1, 10]), "must start at 0, got 1"),
        (torch.tensor([0, 6, 4, 10]), "must not decrease, got 6 then 4"),
        (torch.tensor([0, 9]), "must end at T = 10, got 9"),
        (torch.tensor([0.0, 10.0]), "must be an int32 or int64 tensor, got torch.float32"),
        (torch.tensor([[0, 10]]), r"must be \[N \+ 1\], got \[1, 2\]"),
        ([0, 10], "must be an int32 or int64 tensor, got list"),
    ],
)
def test_cu_seqlens_are_checked(cu_seqlens, message: str) -> None:
    one = {name: x[:1] for name, x in GOOD.items() if name not in ("a", "b", "initial_state")}
    with pytest.raises(ValueError, match="cu_seqlens " + message):
        call(**one | {"cu_seqlens": cu_seqlens, "initial_state": None})


def test_beta_is_a_required_keyword() -> None:
    with pytest.raises(TypeError, match="beta"):
        delta_rule(GOOD["q"], GOOD["k"], GOOD["v"])


def test_unknown_keywords_are_errors() -> None:
    with pytest.raises(TypeError, match="chunk_size"):
        call(chunk_size=64)


def test_dplr_needs_its_erase() -> None:
    with pytest.raises(ValueError, match=r"b must be a tensor .* use delta_rule"):
        dplr(GOOD["q"], GOOD["k"], GOOD["v"], a=torch.zeros(2, 10, 4, 8), b=None)


@pytest.mark.parametrize("length", [-1, 2.0, True, "3"])
def test_pack_wants_lengths(length) -> None:
    with pytest.raises(ValueError, match="lengths must be integers of 0 or more"):
        pack([3, length])


def test_pack() -> None:
    assert pack([]).tolist() == [0]
    assert pack([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert pack([2]).dtype == torch.int64
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert pack(mask.sum(1)).tolist() == [0, 2, 5]


def test_the_state_is_dropped_on_request() -> None:
    assert call(return_state=False).final_state is None


def test_explain_names_what_runs() -> None:
    rows = explain(GOOD["q"], GOOD["k"], GOOD["v"], beta=GOOD["beta"])
    runs = [(row.impl, row.runs) for row in rows]
    assert runs == [("triton", False), ("gluon", False), ("torch", True), ("reference", False)]
    assert "CUDA" in rows[0].reason
    assert all(row.reason for row in rows)
    with pytest.raises(ValueError, match="beta must be"):
        explain(GOOD["q"], GOOD["k"], GOOD["v"], beta=GOOD["beta"][0])


def step(**changes):
    names = ("q", "k", "v", "beta", "log_decay")
    one = {name: GOOD[name][:, :1] for name in names} | {"state": GOOD["initial_state"].clone()}
    arguments = one | changes
    return recurrent_step(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"state": torch.zeros(2, 4, 8, 6)},
            r"state must be \[slots, HV, V, K\] = \[\*, 4, 6, 8\]",
        ),
        ({"state": torch.zeros(3, 4, 6, 8)}, "state must have B = 2 rows without state_indices"),
        (
            {"state": torch.zeros(2, 4, 6, 8).double()},
            "state must be torch.float32 or torch.bfloat16 or torch.float16",
        ),
        ({"state": torch.zeros(2, 4, 6, 8).double()}, "for q in torch.float32, got torch.float64"),
        ({"state_indices": [0, 1]}, "state_indices must be a tensor or None, got list"),
        ({"state_indices": torch.tensor([-2, 0])}, "state_indices must lie in .* got -2"),
        ({"state_indices": torch.tensor([2, 0])}, r"state_indices must lie in \[0, 2\).* got 2"),
        ({"state_indices": torch.tensor([1, 1])}, "state_indices must name no slot twice"),
        ({"state_indices": torch.zeros(3).long()}, r"state_indices must be \[B\] = \[2\]"),
        ({"state_indices": torch.zeros(2)}, "state_indices must be an int32 or int64"),
        ({"a": torch.zeros(2, 1, 4, 8), "b": torch.zeros(2, 1, 4, 8)}, "beta and a, b exclude"),
        ({"beta": None, "a": torch.zeros(2, 1, 4, 8)}, "a and b go together"),
        ({"state": torch.zeros(2, 4, 6, 8, requires_grad=True)}, "recurrent_step has no gradient"),
    ],
)
def test_recurrent_step_names_the_argument(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(**changes)


def test_recurrent_step_takes_few_tokens() -> None:
    case = make_case("none", "none", tokens=17, dtype=torch.float32).tensors
    with pytest.raises(ValueError, match="1 to 16 tokens, got T = 17"):
        recurrent_step(case["q"], case["k"], case["v"], beta=None, state=case["initial_state"])


def test_a_free_erase_has_one_step_and_its_own_norm() -> None:
    case = make_case("none", "free", tokens=2, dtype=torch.float32).tensors
    arguments = [case[name] for name in ("q", "k", "v")]
    free = {"beta": None, "a": case["a"], "b": case["b"]}
    for call in (partial(recurrent_step, state=case["initial_state"]), explain):
        with pytest.raises(ValueError, match="normalize_qk must be False with a free erase"):
            call(*arguments, **free, normalize_qk=True)
        twice = [x.repeat_interleave(2, 1) for x in arguments[1:]]
        with pytest.raises(ValueError, match="n_steps must be 1 with a free erase"):
            call(arguments[0], *twice, **free, n_steps=2)
        with pytest.raises(ValueError, match="a and b go together, got only a"):
            call(*arguments, **free | {"b": None})
        with pytest.raises(ValueError, match="beta and a, b exclude each other"):
            call(*arguments, **free | {"beta": GOOD["beta"][:, :2]})


def test_attention_matrix_names_the_argument() -> None:
    with pytest.raises(ValueError, match="k must have 4 axes"):
        attention_matrix(GOOD["q"], GOOD["k"][0], beta=None)
    with pytest.raises(ValueError, match=r"beta must have a multiple of the 2 heads .* got 3"):
        attention_matrix(GOOD["q"], GOOD["k"], beta=GOOD["beta"][..., :3])
    with pytest.raises(ValueError, match="log_decay must be"):
        attention_matrix(GOOD["q"], GOOD["k"], beta=None, log_decay=GOOD["log_decay"][0])
    empty = attention_matrix(GOOD["q"][:, :0], GOOD["k"][:, :0], beta=None)
    assert empty.shape == (2, 2, 0, 0)
