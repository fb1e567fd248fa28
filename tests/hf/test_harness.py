"""The EleutherAI harness reads both kinds of model through its own class. It is in no extra."""

import contextlib

import pytest
import torch

from deltarule.hf import byte_tokenizer, patch
from hf.families import tiny
from hf.own_models import make

instance = pytest.importorskip("lm_eval.api.instance", reason="lm-eval is in no extra")
huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is in no extra")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [("The cat", " sat on the mat"), ("A", " longer text"), ("", "no context"), ("f(", "x): y")]


@pytest.mark.parametrize("side", ["own", "patched"])
def test_log_likelihoods_and_texts(side):
    model = make() if side == "own" else tiny("qwen3_5", vocab_size=257)
    tokenizer = byte_tokenizer()
    with contextlib.nullcontext() if side == "own" else patch(model):
        harness = huggingface.HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=64
        )
        asked = [instance.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
        for (context, text), (value, _) in zip(PAIRS, harness.loglikelihood(asked), strict=True):
            before = tokenizer(context).input_ids or [tokenizer.bos_token_id]
            after = tokenizer(text).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([before + after]), use_cache=False).logits[0]
            scores = logits.log_softmax(-1)[len(before) - 1 : -1]
            expected = scores.gather(1, torch.tensor(after)[:, None]).sum().item()
            assert value == pytest.approx(expected, abs=1e-3)
        rolling = instance.Instance("loglikelihood_rolling", {}, ("x" * 150,), 0)
        assert harness.loglikelihood_rolling([rolling])[0] < 0
        options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
        asked = [
            instance.Instance("generate_until", {}, (prompt, options), i)
            for i, prompt in enumerate(("Hello", "A much longer prompt"))
        ]
        assert all(isinstance(text, str) for text in harness.generate_until(asked))
