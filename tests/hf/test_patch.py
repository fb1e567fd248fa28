"""What a patch promises beside its numbers: what it replaces, takes back, refuses and survives."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from deltarule import BetaLogits, DecayLogits, hf, recurrent_step
from deltarule.hf import patch, recurrence
from hf.families import (
    FAMILIES,
    MULTIMODAL,
    VOCABULARY,
    alone,
    cache_name,
    error,
    in_one_row,
    logits,
    make,
    tiny,
    tokens,
)


def test_what_is_replaced_and_taken_back_with_the_last_model_that_holds_it():
    def places():
        return modeling.torch_chunk_gated_delta_rule, modeling.Qwen3_5RMSNorm.forward

    originals = places()
    first, second = patch(tiny("qwen3_5")), patch(tiny("qwen3_5"))
    names = [f"Qwen3_5{name}.forward" for name in ("RMSNorm", "RMSNormGated", "MLP")]
    names += [f"modeling_qwen3_5.{x}" for x in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")]
    assert {*names} <= {*first.replaced}
    for patched in (first, first):
        patched.unpatch()
        assert not any(x is y for x, y in zip(places(), originals, strict=True))
    second.unpatch()
    assert all(x is y for x, y in zip(places(), originals, strict=True))
    with patch(tiny("qwen3_5"), conv=False, packing=False, norms=False) as patched:
        left = ("conv", "mask", "Norm", "MLP")
        assert not any(part in name for name in patched.replaced for part in left)


@pytest.mark.parametrize("config", ["LlamaConfig", "Lfm2Config"])
def test_a_model_without_recurrent_layers_is_named(config):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 8}  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    with pytest.raises(ValueError, match=config.replace("Config", "ForCausalLM")):
        patch(model)
    with pytest.raises(ValueError, match="Linear"):
        patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="and str has none"):
        patch("qwen3_5")
    with pytest.raises(ValueError, match="conv must be True or False, got 'no'"):
        patch(tiny("qwen3_5"), conv="no")


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "mamba", "minimax"])
def test_documents_in_several_rows(name):
    """Each row packed in its own way; the state is that of each row's last document."""
    model = tiny(name)
    rows = [[tokens(n) for n in lengths] for lengths in ((5, 9, 6), (20,))]
    ids, places = (torch.cat(x) for x in zip(*map(in_one_row, rows), strict=True))
    with patch(model):
        expected = torch.cat([alone(model, row) for row in rows])
        assert error(logits(model, ids, position_ids=places), expected) < 5e-6


def test_documents_of_a_multimodal_wrapper():
    """Its four rows of positions begin with those of the text."""
    model, documents = make(MULTIMODAL), [tokens(n) for n in (13, 40, 16)]
    ids, places = in_one_row(documents)
    with patch(model):
        expected = alone(model, documents)
        for given in (places, places.expand(4, 1, -1)):
            assert error(logits(model, ids, position_ids=given), expected) < 5e-6


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "mamba"])
def test_the_last_document_goes_on(name):
    model, documents = tiny(name), [tokens(n) for n in (5, 9, 6)]
    ids, places = in_one_row(documents)
    key = cache_name(model)
    layers = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    with patch(model), torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=True)[key]
        single = model(documents[-1][None], use_cache=True)[key]
    for layer in layers:
        ours, theirs = (x.layers[layer].recurrent_states[0] for x in (packed, single))
        assert error(ours, theirs) < 5e-6


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2", "mamba"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_remember_their_own_documents(name, reentrant):
    """Two forward passes packed differently, then one backward: each is computed as it was."""
    model = tiny(name).train()
    calls = [in_one_row([tokens(n) for n in lengths]) for lengths in ((5, 9, 6), (14, 6))]

    def gradients():
        model.zero_grad()
        losses = [model(ids, position_ids=p, labels=ids, use_cache=False).loss for ids, p in calls]
        sum(losses).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with patch(model):
        plain = gradients()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        for ours, theirs in zip(gradients(), plain, strict=True):
            assert torch.equal(ours, theirs)
    name = "_gradient_checkpointing_func"
    functions = {getattr(m, name).func for m in model.modules() if hasattr(m, name)}
    assert functions == {torch.utils.checkpoint.checkpoint}


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2"])
@pytest.mark.parametrize("patched_first", [False, True])
def test_weights_that_accelerate_brings_for_each_call(name, patched_first):
    """Outside of its module's forward such a weight has no values."""
    model, ids = tiny(name), tokens(1, 8)
    before = logits(model, ids)
    if not patched_first:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with patch(model):
        if patched_first:
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert error(logits(model, ids), before) < 1e-5


def test_packing_under_peft():
    """LoRA's wrapper calls the forward of the model in it, past its hooks."""
    model = tiny("qwen3_5")
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).eval()
    documents = [tokens(n) for n in (7, 12)]
    ids, places = in_one_row(documents)
    with patch(model):
        assert error(logits(model, ids, position_ids=places), alone(model, documents)) < 5e-6


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "minimax"])
def test_packed_documents_cannot_go_on_from_a_cache(name):
    model = tiny(name)
    key = cache_name(model)
    with patch(model), torch.no_grad():
        cache = model(tokens(1, 8), use_cache=True)[key]
        with pytest.raises(ValueError, match=key):
            model(tokens(1, 8), cu_seq_lens_q=torch.tensor([0, 3, 8]), **{key: cache})


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "kimi_linear",
     "bailing_hybrid", "glm5_next"],
)  # fmt: skip
def test_a_step_makes_gates_of_logits(name, monkeypatch):
    """No layer makes gates of its own."""
    given = []

    def spied(*streams, beta, log_decay, **options):
        given.append((type(beta), type(log_decay)))
        return recurrent_step(*streams, beta=beta, log_decay=log_decay, **options)

    monkeypatch.setattr(recurrence, "recurrent_step", spied)
    model = tiny(name)
    with patch(model):
        model.generate(tokens(1, 5), max_new_tokens=3, min_new_tokens=3)
    layers = model.config.get_text_config().layer_types.count("linear_attention")
    assert given == [(BetaLogits, DecayLogits)] * 2 * layers


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_a_step_with_a_gradient(name):
    """transformers' own step has none: the cache is overwritten under the backward pass.

    Norms in float32 leave three digits to a difference quotient.
    """
    model, ids = tiny(name).double(), tokens(1, 6)
    key = cache_name(model)
    places = {} if name == "mamba2" else {"position_ids": torch.tensor([[5]])}
    weight = next(p for n, p in model.named_parameters() if "in_proj" in n)
    direction = torch.randn_like(weight)

    def loss(cache):
        out = model(ids[:, 5:], **{key: copy.deepcopy(cache)}, **places)
        return out.logits.square().mean()

    with patch(model):
        with torch.no_grad():
            cache = model(ids[:, :5], use_cache=True)[key]
        loss(cache).backward()
        slope = (weight.grad * direction).sum().item()
        with torch.no_grad():
            weight.add_(3e-4 * direction)
            above = loss(cache)
            weight.sub_(6e-4 * direction)
            below = loss(cache)
    assert slope == pytest.approx(((above - below) / 6e-4).item(), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    # Rounding sends tokens to other experts, which hides what the operators round.
    [("qwen3_5", {}), ("kimi_linear", {"mlp_layer_types": ["dense"] * 4}), ("mamba2", {})],
)
def test_bfloat16_is_as_exact_as_the_fallback(name, options):
    model, ids = tiny(name, **options), tokens(2, 70)
    exact = logits(model, ids)
    model.bfloat16()
    theirs = error(logits(model, ids).float(), exact)
    with patch(model):
        assert error(logits(model, ids).float(), exact) < 1.3 * theirs


COMPILED = ("qwen3_5", "kimi_linear", "mamba2")
# transformers' own Qwen4-exp can be neither compiled whole nor exported.
OTHERS = [
    pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n not in (*COMPILED, "qwen4_exp")
]


@pytest.mark.parametrize("name", [*COMPILED, *OTHERS])
def test_compiled_and_exported(name):
    model, ids = tiny(name), tokens(1, 20)
    before = logits(model, ids)
    with patch(model), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert error(compiled(ids, use_cache=False).logits, before) < 1e-5
        exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        assert error(exported.module()(ids, use_cache=False).logits, before) < 1e-5
    assert "deltarule.recurrence" in str(exported.graph)


def test_static_cache():
    model, ids = tiny("qwen3_5"), tokens(2, 12)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"cache_implementation": "static", "disable_compile": True}
    plain = model.generate(ids, **options)
    with patch(model):
        assert torch.equal(model.generate(ids, **options), plain)


def test_a_patched_model_can_be_copied_and_pickled():
    model, ids = tiny("mamba2"), tokens(1, 9)
    with patch(model):
        expected = logits(model, ids)
        assert torch.equal(logits(copy.deepcopy(model), ids), expected)
        assert torch.equal(logits(pickle.loads(pickle.dumps(model)), ids), expected)


def test_packing_is_refused_where_attention_mixes_documents():
    model, (ids, places) = tiny("glm5_next"), in_one_row([tokens(5), tokens(4)])
    with patch(model):
        with pytest.raises(ValueError, match=r"mixed by Glm5Next\w*Attention"):
            logits(model, ids, position_ids=places)
        logits(model, ids)
    with patch(model, packing=False):
        logits(model, ids, position_ids=places)


def test_threads_have_notes_of_their_own():
    """One model, packed in one thread and not in the other, at the same time."""
    model, (ids, places) = tiny("qwen3_5"), in_one_row([tokens(30), tokens(34)])
    with patch(model), ThreadPoolExecutor(2) as pool:
        plain, packed = logits(model, ids), logits(model, ids, position_ids=places)
        assert error(plain, packed) > 0.1
        options = [{}, {"position_ids": places}] * 20
        results = list(pool.map(lambda option: logits(model, ids, **option), options))
    for i, result in enumerate(results):
        assert torch.equal(result, packed if i % 2 else plain)


def test_an_error_inside_leaves_no_note_behind():
    model, (ids, places) = tiny("qwen3_5"), in_one_row([tokens(5), tokens(4)])
    with patch(model):
        expected = logits(model, ids)
        with pytest.raises(IndexError):
            model(ids + VOCABULARY, position_ids=places, use_cache=False)
        assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize(("installed", "message"), [(None, r"hf\]"), ("5.22.1", "5.22.1 is ins")])
def test_what_to_install_is_said(installed, message, monkeypatch):
    def version(name):
        if installed is None:
            raise hf.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(hf.metadata, "version", version)
    with pytest.raises(ImportError, match=message):
        hf._check_transformers()
