"""transformers' models as they are and under `deltarule.hf.patch`, in turns in one process.

    python -m bench.patched --output docs/figures/patched_cpu.json

On a GPU it is a Qwen3.5 of a billion random parameters in bfloat16, beside the kernels that
transformers finds (FLA's, if that is installed) and, with FLA, once more with FLA's convolution in
place of PyTorch's; on a CPU small models of three families in float32 on one thread, beside
transformers' own PyTorch functions. `ms` and `seconds` are of wall-clock time, what begins with
`processor_` in the file above is not.
"""

import argparse
import importlib
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from bench import results, timing
from bench.cpu import transformers_version
from bench.sides import apart

Row = dict[str, Any]
Sides = Mapping[str, Callable[[], AbstractContextManager[object]]]
OURS, THEIRS, THEIR_CONVOLUTION = "deltarule", "transformers", "transformers, FLA's convolution"
REPEATS, PROMPT = 5, 128
RECURRENCES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


class Sizes(NamedTuple):
    """A configuration class of transformers with its arguments, and [B, T] of what is timed."""

    config: str
    options: dict[str, Any]
    prefill: Sequence[int]
    training: Sequence[int]
    new_tokens: int


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def models_of(group: str) -> dict[str, Sizes]:
    common = TABLE["common"] | {"eos_token_id": None}
    found = {name: Sizes(**row) for name, row in TABLE[group].items()}
    return {name: sizes._replace(options=common | sizes.options) for name, sizes in found.items()}


def main(output: Path, models: Mapping[str, Sizes], repeats: int = REPEATS) -> Row:
    """Time every model, each side `repeats` times in turns, after a run that compiles.

    Each figure is written at once.
    """
    report = results.new_report(sys.argv[1:], "python -m bench.patched")
    report["device"] = report["device"] or "cpu"
    report["versions"] |= transformers_version()
    report["threads"] = torch.get_num_threads()
    return results.file_each(report, figures(models, repeats), output)


def figures(models: Mapping[str, Sizes], repeats: int) -> Iterator[results.Found]:
    for name, sizes in models.items():
        model = built(sizes, "cuda" if torch.cuda.is_available() else "cpu")
        facts = {"model": name, "parameters": sum(x.numel() for x in model.parameters())}
        facts["theirs"] = {x: origin(getattr(file_of(model), x, None)) for x in RECURRENCES}
        sides = sides_of(model)
        for work, run in works(model, sizes).items():
            for side, row in in_turns(run, sides, repeats):
                yield side, {"kind": "patched", **facts, "work": work}, row


def built(sizes: Sizes, device: str) -> nn.Module:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, sizes.config)(**sizes.options)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def works(model: Any, sizes: Sizes) -> dict[str, Callable[[], Tensor | None]]:
    """What is timed, by name; each returns what the sides should agree on, if anything.

    Greedy tokens of random weights part at the first near tie of 16 bits.
    """
    vocabulary = sizes.options["vocab_size"]
    prompt, text = (
        torch.randint(3, vocabulary, shape, device=model.device)
        for shape in (sizes.prefill, sizes.training)
    )

    def prefill() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(prompt)["logits"][:, -1:].float()
        return logits

    def generate() -> None:
        new = sizes.new_tokens
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        model.generate(prompt[:, :PROMPT], **options)

    def train() -> Tensor:
        model.train()
        model.zero_grad()
        loss = model(text, labels=text, use_cache=False).loss
        loss.backward()
        model.eval()
        return loss.detach()

    found: dict[str, Callable[[], Tensor | None]] = {"prefill": prefill}
    if sizes.new_tokens:
        found["generate"] = generate
    return found | {"training step": train}


def in_turns(
    run: Callable[[], Tensor | None], sides: Sides, repeats: int
) -> Iterator[tuple[str, Row]]:
    """The seconds of each side, in turns after a run that compiles, and milliseconds of the median.

    `difference` is the relative RMS between what a side gives and what transformers gives.
    """
    outputs: dict[str, Tensor | None] = {}

    def of_side(side: str) -> None:
        with sides[side]():
            outputs[side] = run()

    seconds = timing.interleaved_seconds({side: partial(of_side, side) for side in sides}, repeats)
    for name, times in seconds.items():
        figures: Row = {"ms": 1e3 * statistics.median(times), "seconds": times}
        if (theirs := outputs[THEIRS]) is not None and (other := outputs[name]) is not None:
            figures["difference"] = apart(other, theirs)
        yield name, figures


def sides_of(model: nn.Module) -> Sides:
    """transformers' model, the same with FLA's convolution where FLA is installed, and patched."""
    from deltarule.hf.patch import accepting, patch

    sides: dict[str, Callable[[], AbstractContextManager[object]]] = {THEIRS: nullcontext}
    file = file_of(model)
    if origin(getattr(file, RECURRENCES[0], None)).startswith("fla."):
        fla = importlib.import_module("fla.modules.causal_conv1d")

        def whole(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
            """[B, D, T] by FLA's kernel, called as transformers calls causal-conv1d's."""
            y, _ = fla.causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)
            return y.transpose(1, 2)

        def step(
            x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str
        ) -> Tensor:
            """[B, D, 1] by FLA's kernel; the last inputs [B, D, W] move on in place."""
            given = {"weight": weight, "bias": bias, "activation": activation}
            y, _ = fla.causal_conv1d_update(x.transpose(1, 2), state, **given)
            return y.transpose(1, 2)

        theirs = {"causal_conv1d_fn": accepting(whole), "causal_conv1d_update": accepting(step)}
        sides[THEIR_CONVOLUTION] = partial(mock.patch.multiple, file, **theirs)
    return sides | {OURS: partial(patch, model)}


def file_of(model: nn.Module) -> Any:
    return sys.modules[type(model).__module__]


def origin(function: Any) -> str:
    """The module of what one of transformers' functions calls: its own, or that of a package."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
    found = cells["implementation"].cell_contents if "implementation" in cells else function
    return getattr(found, "__module__", "none")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="file for the raw figures")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of each side")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    main(options.output, models_of("gpu" if on_gpu else "cpu"), options.repeats)
