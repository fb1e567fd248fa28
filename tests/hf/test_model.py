"""This library's model under transformers' interface: the same numbers, states and files."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from deltarule.hf import DeltaruleConfig, DeltaruleForCausalLM, StateCache, byte_tokenizer, wrap
from deltarule.hf.hooks import CACHE
from deltarule.models import CausalLM, CheckpointError, ModelConfig
from hf.families import FORMS, alone, collated, error, logits
from hf.own_models import HYBRID, LAYERS, bytes_like, make

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(params=LAYERS)
def model(request):
    return make(request.param)


def test_logits_are_those_of_the_model(model):
    ids = bytes_like(2, 30)
    assert torch.equal(model(ids).logits, model.model(ids)[0])
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, 257)
    picked = model(ids, logits_to_keep=torch.tensor([3])).logits
    assert error(picked, model(ids).logits[:, [3]]) < 1e-6
    assert isinstance(model(ids, return_dict=False), tuple)


def test_generate_with_and_without_a_cache(model):
    ids = bytes_like(2, 20)
    cached = model.generate(ids, **GREEDY)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **GREEDY))
    own = model.model.generate(list(ids), max_new_tokens=12, temperature=0)
    assert cached[:, 20:].tolist() == own
    sampled = model.generate(ids, max_new_tokens=3, do_sample=True, num_return_sequences=3)
    assert sampled.shape == (6, 23)


def test_a_stop_string_is_read_with_a_tokenizer():
    model, ids = make(), bytes_like(1, 20)
    drawn = model.generate(ids, max_new_tokens=40, do_sample=False)[0, 20:].tolist()
    letter = next(token for token in drawn if 32 < token < 127)
    settings = {"stop_strings": [chr(letter)], "max_new_tokens": 40, "do_sample": False}
    stopped = model.generate(ids, tokenizer=byte_tokenizer(), **settings)[0, 20:].tolist()
    assert stopped == drawn[: drawn.index(letter) + 1]


def test_padding_on_either_side_is_nothing(model):
    ids, following = bytes_like(2, 20), bytes_like(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    padded = model.generate(ids, attention_mask=mask, **GREEDY)[0, 20:]
    assert torch.equal(padded, model.generate(ids[:1, 7:], **GREEDY)[0, 13:])
    mask = mask.flip(1)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask)[CACHE]
        longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        ours = model(following, attention_mask=longer, past_key_values=cache).logits[0, -1]
        single = model(torch.cat([ids[:1, :13], following[:1]], 1)).logits[0, -1]
    assert error(ours, single) < 5e-6


def test_beams(model):
    ids = bytes_like(2, 10)
    beams = model.generate(ids, num_beams=3, **GREEDY)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **GREEDY))


def test_prompt_lookup_takes_back_what_was_wrong(model, monkeypatch):
    """A prompt that repeats itself proposes tokens, most of which are refused."""
    taken_back = []
    crop = StateCache.crop

    def counted(self, tokens_to_remove):
        taken_back.append(abs(tokens_to_remove))
        crop(self, tokens_to_remove)

    monkeypatch.setattr(StateCache, "crop", counted)
    ids = bytes_like(1, 5).repeat(1, 4)
    looked_up = model.generate(ids, prompt_lookup_num_tokens=4, **GREEDY)
    assert torch.equal(looked_up, model.generate(ids, **GREEDY))
    assert sum(taken_back) > 0


def test_assisted_generation():
    """The assistant steps alone, several tokens at a time, and goes back over all of them."""
    target, assistant = make("hybrid"), make("gated_deltanet")
    ids = bytes_like(1, 12)
    expected = target.generate(ids, max_new_tokens=25, do_sample=False)
    ours = target.generate(ids, assistant_model=assistant, max_new_tokens=25, do_sample=False)
    assert torch.equal(ours, expected)
    ours = target.generate(ids, assistant_model=target, max_new_tokens=25, do_sample=False)
    assert torch.equal(ours, expected)


def test_crop_across_calls(model):
    """Back over two whole calls and into a third, with padding in it."""
    ids = bytes_like(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        cache = StateCache()
        cache.activate_past_recording()
        model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        for t in range(5, 9):
            model(ids[:, t : t + 1], past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 4
        again = model(ids[:, 4:], past_key_values=cache).logits
        whole = model(ids, attention_mask=mask).logits[:, 4:]
        assert error(again, whole) < 5e-6
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-20)


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_stay_apart(model, form):
    documents = [bytes_like(length) for length in (13, 1, 40, 16)]
    model.train()
    out = model(**collated(documents, form))
    assert error(out.logits, alone(model, documents)) < 5e-6
    assert getattr(out, CACHE) is None
    losses = [
        model(document[None], labels=document[None]).loss
        for document in documents
        if len(document) > 1
    ]
    mean = sum(x * n for x, n in zip(losses, (12, 39, 15), strict=True)) / 66
    assert out.loss.item() == pytest.approx(mean.item(), rel=1e-5)


def test_documents_in_several_rows():
    model = make("hybrid")
    lengths = ((5, 9, 6), (20,))
    ids = bytes_like(2, 20)
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    expected = [alone(model, row.split(sizes)) for row, sizes in zip(ids, lengths, strict=True)]
    assert error(logits(model, ids, position_ids=places), torch.cat(expected)) < 5e-6
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids, seq_idx=places, past_key_values=model(ids)[CACHE])


def test_one_folder_for_both_worlds(model, tmp_path):
    ids = bytes_like(2, 20)
    expected = model(ids).logits
    model.model.save(tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(theirs(ids).logits, expected)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = CausalLM.load(tmp_path / "theirs")
    assert ours.config == model.model.config
    assert torch.equal(ours(ids)[0], expected)
    assert AutoConfig.from_pretrained(tmp_path / "theirs").to_model_config() == ours.config


def test_shards(tmp_path):
    model, ids = make("hybrid"), bytes_like(1, 10)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(CausalLM.load(tmp_path)(ids)[0], model(ids).logits)
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits
    )


def test_gates_stay_in_float32(model, tmp_path):
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    own = copy.deepcopy(model.model).bfloat16()
    exact = {name for name, p in own.named_parameters() if p.dtype == torch.float32}
    kept = {
        name.removeprefix("model.")
        for name, p in half.named_parameters()
        if p.dtype == torch.float32
    }
    assert kept == exact
    ids = bytes_like(1, 10)
    assert torch.equal(half(ids).logits, own(ids)[0])
    half.save_pretrained(tmp_path / "half")
    assert torch.equal(CausalLM.load(tmp_path / "half")(ids)[0], half(ids).logits)


def test_an_untied_head(tmp_path):
    config = DeltaruleConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_heads=2,
        mixers=["kda", "attention"],
        tie_word_embeddings=False, eos_token_id=3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, DeltaruleForCausalLM)
    assert model.get_output_embeddings() is model.model.head
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config.eos_token_id == 3


def test_all_options_make_the_way_there_and_back():
    config = ModelConfig(
        vocab_size=9, hidden_size=32, num_layers=4, num_heads=2, num_v_heads=4, head_k_dim=8,
        head_v_dim=16, num_attention_heads=4, num_kv_heads=2, conv_size=3, output_gate=True,
        beta_max=2.0, layer_types=HYBRID, window=7, rope_theta=5.0, mlp_size=16, norm_eps=1e-3,
        tie_embeddings=False,
    )  # fmt: skip
    assert DeltaruleConfig.from_model_config(config).to_model_config() == config


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "vocab_size must be an integer"), ({"vocab_size": 9, "mixers": "llama"}, "hidden_size")],
)
def test_a_config_that_describes_no_model(options, message):
    with pytest.raises(ValueError, match=message):
        DeltaruleForCausalLM(DeltaruleConfig(**options))


def test_wrapping_shares_parameters_and_draws_nothing():
    own = make().model.train()
    before = torch.get_rng_state()
    wrapped = wrap(own, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert wrapped.model is own
    assert wrapped.training
    assert wrapped.generation_config.eos_token_id == 3
    for other in (wrapped, "runs/text"):
        with pytest.raises(ValueError, match=r"model must be a CausalLM, got (Delta|str)"):
            wrap(other)


def test_what_is_missing_from_a_folder_is_named(tmp_path):
    make().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        CausalLM.load(tmp_path)
    with pytest.raises(CheckpointError, match="weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs_embeds": torch.zeros(1, 3, 64)},
        {"output_hidden_states": True},
        {"attention_mask": torch.ones(1, 1, 3, 3)},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_is_not_supported_is_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        make()(bytes_like(1, 3), **arguments)


def test_embeddings_can_be_replaced():
    model = make()
    model.set_input_embeddings(nn.Embedding(257, 64))
    assert model.get_input_embeddings() is model.model.embedding
    assert model.get_output_embeddings() is None


def test_bytes_are_tokens():
    tokenizer, raw = byte_tokenizer(), "né \x00\n \t日本語"
    assert tokenizer(raw).input_ids == list(raw.encode())
    assert tokenizer.decode(list(raw.encode())) == raw
    assert len(tokenizer) == 257
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert special == (256, 256, 256)
    every = [tokenizer.convert_ids_to_tokens(i) for i in range(256)]
    assert len(set(every)) == 256


def test_a_tokenizer_beside_a_model(tmp_path):
    make(eos_token_id=256, pad_token_id=256).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    CausalLM.load(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = tokenizer(["ab", "a longer row"], return_tensors="pt", padding=True)
    assert batch.attention_mask[0].tolist() == [0] * 10 + [1, 1]
    batch.pop("token_type_ids", None)
    out = model.generate(**batch, **GREEDY)
    assert isinstance(tokenizer.batch_decode(out)[0], str)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 256
