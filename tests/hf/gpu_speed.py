"""Time a Qwen3.5 of 1.1 B random parameters on a GPU: patched, then with what transformers found.

    PYTHONPATH=tests python tests/hf/gpu_speed.py

With FLA installed transformers runs its kernels, otherwise its own PyTorch functions. Each figure
is the median of five after two that are not counted; the errors compare float32 logits of tiny
models on the GPU with those on the CPU, both patched.
"""

import contextlib
import importlib.util
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

from deltarule.hf import patch
from hf.families import error, tiny, tokens

PROMPT, TRAINING, STEPS = (8, 4096), (4, 4096), 64


def model_of_one_billion():
    """16 layers, three of Gated DeltaNet to one of attention."""
    config = Qwen3_5TextConfig(
        vocab_size=32768, hidden_size=2048, num_hidden_layers=16, intermediate_size=6144,
        head_dim=256, num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def median_ms(work) -> float:
    """Wall-clock milliseconds, the device's work included."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def works(model):
    """What is timed, by name."""
    prompt, row = (torch.randint(3, 32768, shape, device="cuda") for shape in (PROMPT, TRAINING))

    def prefill():
        with torch.no_grad():
            model(prompt, logits_to_keep=1)

    def generate():
        options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
        model.generate(prompt[:, :128], **options)

    def train():
        model.train().zero_grad()
        model(row, labels=row, use_cache=False).loss.backward()
        model.eval()

    return {"prefill": prefill, "generate": generate, "training step": train}


def exactness() -> None:
    """Every path of a family on the GPU: whole, packed, steps, beams."""
    for name in ("qwen3_5", "kimi_linear", "mamba2"):
        model, ids = tiny(name), tokens(2, 70)
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        # FLA, where it is installed, takes no CPU tensors: the CPU's side is patched, too.
        with patch(model), torch.no_grad():
            before = model(ids, use_cache=False).logits
            greedy, beams = (model.generate(ids[:, :20], num_beams=n, **options) for n in (1, 3))
        model, ids = model.cuda(), ids.cuda()
        with patch(model), torch.no_grad():
            whole = error(model(ids, use_cache=False).logits.cpu(), before)
            places = torch.cat([torch.arange(30), torch.arange(40)]).cuda()[None]
            alone = torch.cat([model(part).logits for part in ids[:1].split([30, 40], 1)], 1)
            packed = error(model(ids[:1], position_ids=places).logits, alone)
            ours = [model.generate(ids[:, :20], num_beams=n, **options).cpu() for n in (1, 3)]
        same = torch.equal(ours[0], greedy), torch.equal(ours[1], beams)
        print(f"{name}: whole {whole:.1e}, packed {packed:.1e}, same tokens {same}", flush=True)


def main() -> None:
    """Print the errors, then the times of the patched model, then of transformers' own."""
    logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    exactness()
    model = model_of_one_billion()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters", flush=True)
    theirs = "FLA" if importlib.util.find_spec("fla") else "PyTorch"
    for side in ("deltarule", theirs):
        with patch(model) if side == "deltarule" else contextlib.nullcontext():
            for label, work in works(model).items():
                start = time.perf_counter()
                print(f"{side:10s} {label:14s} {median_ms(work):8.1f} ms", end=" ")
                print(f"({time.perf_counter() - start:.0f} s with compiling)", flush=True)


if __name__ == "__main__":
    main()
