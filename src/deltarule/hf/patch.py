"""transformers' own model classes on this library's operators."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from deltarule.hf import layers, recurrence
from deltarule.hf.hooks import forget_checkpointing, hook_packing, hook_padding, with_documents
from deltarule.hf.norms import NORMS
from deltarule.ops.checks import check_flags

Function = Callable[..., Any]


def _no_shortcut(*_args: Any, **_kwargs: Any) -> None:
    """Tell the layer that no kernel does all of it at once, which sends it on to the functions."""


# What a modeling file of transformers calls, by its name there, and what takes its place.
RECURRENCES: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": recurrence.gated_delta_rule,
    "torch_recurrent_gated_delta_rule": recurrence.gated_delta_rule,
    "chunk_kimi_delta_attention": recurrence.gated_delta_rule,
    "recurrent_kimi_delta_attention": recurrence.gated_delta_rule,
    "mamba2_chunk_scan": recurrence.mamba2_chunk_scan,
    "mamba2_selective_state_update": recurrence.mamba2_step,
    "mamba_selective_scan": recurrence.mamba_selective_scan,
}
SHORTCUTS = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
CONVOLUTIONS: dict[str, Function] = {
    "causal_conv1d_fn": layers.causal_conv1d,
    "causal_conv1d_update": layers.causal_conv1d_step,
}
# Layers that call no function: class and forward.
FORWARDS: dict[str, Function] = {"MiniMaxLightningAttention": layers.lightning_attention}
# The same, of layers that make gates and call the short convolution, too, and of KDA's gates.
GATED_LAYERS: dict[str, Function] = dict.fromkeys(
    ("BailingHybridDeltaAttention", "Glm5NextTextLinearAttention", "KimiLinearDeltaAttention",
     "LaraMiniGatedDeltaNet",
     "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet",
     "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"), layers.gated_delta_layer,
) | dict.fromkeys(
    ("BailingHybridForgetGate", "Glm5NextTextForgetGate", "KimiLinearForgetGate"),
    layers.forget_gate,
)  # fmt: skip
# What makes the masks of the attention layers between them.
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
# A step of Mamba is a few products, of which no operator makes fewer.
KEPT = ("mamba_selective_state_update",)

Place = tuple[Any, str]
# What stood in each place, and how many patches hold its replacement.
_HELD: dict[Place, tuple[Any, int]] = {}


def patch(
    model: nn.Module, *, conv: bool = True, packing: bool = True, norms: bool = True
) -> "Patch":
    r"""Run a model of transformers on this library's operators, forward and backward.

    The patch replaces the functions of the modeling file that its recurrent layers call. It also
    keeps documents packed into one row apart in every family (given as `cu_seq_lens_q`, as
    `seq_idx`, or as `position_ids` that start again), and after a prompt padded on the right the
    cache holds the state of the last real token.

    The functions belong to the process: every model of the same family uses the replacements until
    the last patch of that family ends. Hooks belong to the model.

    Args:
        model: A model of transformers, or one that wraps it (PEFT, a pipeline's `model`). Families:
            Qwen3.5, Qwen3-Next, Qwen4-exp, OLMo-hybrid, Kimi Linear, Bailing-hybrid, GLM5-Next,
            Mamba-2, Bamba, Falcon-H1, Granite-4-H, Nemotron-H, Zamba, Zamba-2, Mamba,
            Falcon-Mamba, Jamba, MiniMax, Lara-mini.
        conv: Whether to replace the short convolution, too. If not, it mixes W - 1 tokens at the
            borders of packed documents, and padding on the right stays in its inputs.
        packing: Whether to look for packed documents. With `position_ids` the host then waits for
            the GPU once per forward pass.
        norms: Whether to replace RMS norms and SwiGLU in the same files, too. On a GPU each is one
            kernel instead of up to twelve.

    Returns:
        The changes, as a context manager; `unpatch()` undoes them.

    Raises:
        ValueError: The model has no recurrent layer of transformers that an operator runs.

    Examples:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4,
        ...                       head_dim=8, state_size=8, n_groups=1)
        >>> with patch(Mamba2ForCausalLM(config)) as patched:
        ...     patched.replaced[0]
        'modeling_mamba2.mamba2_chunk_scan'

    Source: the names and signatures of transformers 5.23 and 5.24.
    """
    check_flags(given := {"conv": conv, "packing": packing, "norms": norms})
    found = replacements(model, **given) if isinstance(model, nn.Module) else {}
    if not found:
        said = "model must have recurrent layers of transformers that deltarule runs"
        why = f"{type(model).__name__} has none; see deltarule.hf.patch for the families"
        raise ValueError(f"{said}, and {why}")
    undo = ExitStack()
    undo.callback(forget_checkpointing, model)
    for (owner, name), function in found.items():
        original, holders = _HELD.get((owner, name), (getattr(owner, name), 0))
        _HELD[owner, name] = original, holders + 1
        if not holders:
            setattr(owner, name, function)
        undo.callback(release, (owner, name))
    # The layers that call the functions: those with a short convolution, and those of FORWARDS.
    for layer in filter(is_theirs, model.modules()):
        if hasattr(layer, "conv1d") or type(layer).__name__ in FORWARDS:
            hook_padding(layer, undo)
    if packing:
        hook_packing(model, mixing_attention(model), undo)
    short = ((owner.__name__.rpartition(".")[2], name) for owner, name in found)
    return Patch(tuple(map(".".join, short)), undo)


class Patch(AbstractContextManager["Patch"]):
    """The changes that one `patch` made.

    Attributes:
        replaced: What was replaced, such as "modeling_qwen3_5.torch_chunk_gated_delta_rule".
    """

    def __init__(self, replaced: tuple[str, ...], undo: ExitStack) -> None:
        """Keep what undoes the changes; only `patch` makes one."""
        self.replaced, self._undo = replaced, undo

    def unpatch(self) -> None:
        """Undo the changes; functions stay replaced while another patch of the family is active."""
        self._undo.close()

    def __exit__(self, *_: object) -> None:
        """Unpatch."""
        self.unpatch()


def release(place: Place) -> None:
    """Give the original back with the last that holds the replacement."""
    original, holders = _HELD.pop(place)
    if holders > 1:
        _HELD[place] = original, holders - 1
    else:
        setattr(*place, original)


def replacements(
    model: nn.Module, *, conv: bool, packing: bool, norms: bool
) -> dict[Place, Function]:
    """What takes which place in the files that the model's recurrent layers come from."""
    functions, classes = RECURRENCES, FORWARDS
    if conv:
        functions, classes = functions | CONVOLUTIONS, classes | GATED_LAYERS
    if norms:
        classes = classes | NORMS
    found: dict[Place, Function] = {}
    # The files of transformers that the model's layers are written in.
    for file in dict.fromkeys(type(x).__module__ for x in model.modules() if is_theirs(x)):
        module = sys.modules[file]
        names = vars(module)
        if not any(name in names for name in (*RECURRENCES, *FORWARDS)):
            continue
        found |= {(module, name): accepting(f) for name, f in functions.items() if name in names}
        forwards = [name for name in classes if name in names]
        found |= {(names[name], "forward"): accepting(classes[name]) for name in forwards}
        found |= {(module, name): _no_shortcut for name in SHORTCUTS if name in names}
        for name in MASKS if packing else ():
            if name in names:
                original, _ = _HELD.get((module, name), (names[name], 0))
                found[module, name] = with_documents(original)
    return found


def is_theirs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def mixing_attention(model: nn.Module) -> str | None:
    """The class of an attention layer that is written without a mask for documents; None: none.

    GLM5-Next's pools keys, across whatever borders there are.
    """
    for module in model.modules():
        names = vars(sys.modules[type(module).__module__])
        recurrent = any(name in names for name in RECURRENCES)
        if recurrent and hasattr(module, "indexer") and not any(name in names for name in MASKS):
            return type(module).__name__
    return None


def accepting(function: Function) -> Function:
    """Drop the keyword arguments that a function does not name, as transformers does for its own.

    Layers hand on whatever their model was called with.
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: x for name, x in kwargs.items() if name in names})

    return call
