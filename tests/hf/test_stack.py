"""Trainer, checkpointing and LoRA, on this library's model and on a patched one."""

import contextlib

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from deltarule.hf import patch
from deltarule.hf.hooks import CACHE
from hf.families import error, tiny
from hf.own_models import bytes_like, make

STEPS, SAVED = 6, 3


class Rows(Dataset):
    """Eight tokens that repeat, so that there is something to learn."""

    def __init__(self, tokens: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(3, 128, (16, 8), generator=generator).repeat(1, tokens // 8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[i].tolist()}


SIDES = {
    "own": lambda: (make("gated_deltanet"), contextlib.nullcontext()),
    "patched": lambda: (lambda model: (model, patch(model)))(tiny("qwen3_5")),
}


@pytest.fixture(params=SIDES)
def side(request):
    return SIDES[request.param]


def train(model, folder, resume=None, **options):
    """The losses of packed rows, step by step."""
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=3e-3,
        report_to=[], logging_steps=1, save_steps=SAVED, use_cpu=True, disable_tqdm=True,
        log_level="error", seed=0, **options,
    )  # fmt: skip
    collate = DataCollatorWithFlattening(return_tensors="pt")
    trainer = Trainer(model, arguments, train_dataset=Rows(), data_collator=collate)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_learns_and_resumes(side, tmp_path):
    model, patched = side()
    with patched:
        losses = train(model.train(), tmp_path / "a")
        assert losses[-1] < losses[0]
    model, patched = side()
    with patched:
        again = train(model.train(), tmp_path / "b", str(tmp_path / "a" / f"checkpoint-{SAVED}"))
    assert again[-SAVED:] == losses[-SAVED:]


def test_checkpointing_changes_no_bit(side, tmp_path):
    runs = []
    for checkpointing in (False, True):
        model, patched = side()
        with patched:
            folder = tmp_path / str(checkpointing)
            runs.append(train(model.train(), folder, gradient_checkpointing=checkpointing))
    assert runs[0] == runs[1]


def test_lora_adapts_every_projection(side, tmp_path):
    model, patched = side()
    ids = bytes_like(2, 24) % 128
    with patched:
        linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        linears -= {"lm_head"}
        before = model(ids, use_cache=False).logits.detach()
        options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        adapted = get_peft_model(model, LoraConfig(**options)).train()
        names = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
        assert {name.split(".", 2)[2].split(".lora_A")[0] for name in names} == linears
        adapted(ids, labels=ids, use_cache=False).loss.backward()
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad.abs().sum() > 0, name
        adapted.eval()
        after = adapted(ids, use_cache=False).logits.detach()
        assert error(after, before) > 0.1
        adapted.save_pretrained(tmp_path)
        merged = adapted.merge_and_unload()
        assert error(merged(ids, use_cache=False).logits, after) < 1e-5
        base, patched_too = side()
        with patched_too:
            loaded = PeftModel.from_pretrained(base, tmp_path).eval()
            assert error(loaded(ids, use_cache=False).logits, after) < 1e-6


def test_an_untied_head_is_adapted_too():
    """LoRA's wrapper around the head is called, not only its weight read."""
    from deltarule.hf import DeltaruleConfig, DeltaruleForCausalLM

    config = DeltaruleConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_heads=2, mixers="kda",
        tie_word_embeddings=False,
    )  # fmt: skip
    model, ids = DeltaruleForCausalLM(config).eval(), torch.arange(9)[None]
    before = model(ids).logits.detach()
    options = {"target_modules": ["head"], "init_lora_weights": False}
    assert error(get_peft_model(model, LoraConfig(**options))(ids).logits, before) > 0.1


def test_int8_weights_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    model = make("hybrid").eval()
    ids = bytes_like(2, 40)
    with torch.no_grad():
        before = model(ids).logits
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        whole = model(ids).logits
        first = model(ids[:, :20], use_cache=True)
        rest = model(ids[:, 20:], **{CACHE: first[CACHE]})
    assert error(whole, before) < 0.05
    assert error(torch.cat([first.logits, rest.logits], 1), whole) < 1e-5
    assert model.generate(ids[:1, :5], max_new_tokens=3).shape[1] == 8


@pytest.mark.parametrize("layers", ["gated_deltanet", "rwkv7", "hybrid"])
def test_weights_that_make_no_new_tensors(layers, monkeypatch):
    """As torchao's int8 weights: a state is not made by a weight."""
    model = make(layers)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    new_zeros = torch.Tensor.new_zeros

    def refused(self, *args, **kwargs):
        assert id(self) not in weights
        return new_zeros(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_zeros", refused)
    model.generate(bytes_like(1, 5), max_new_tokens=3)
