"""The checks that hold for every implementation."""

from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dense(name: str, x: object, or_else: str = "") -> None:
    """Refuse what is not a plain dense tensor: others fail deep inside of PyTorch."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor{or_else}, got {type(x).__name__}")
    if x.is_nested:
        raise ValueError(
            f"{name} must be one dense tensor, got a nested one: lay its sequences end to end in "
            "one row, with cu_seqlens=deltarule.pack(lengths)"
        )
    if x.layout != torch.strided or x.is_quantized:
        given, call = (x.dtype, "dequantize") if x.is_quantized else (x.layout, "to_dense")
        raise ValueError(f"{name} must be a dense tensor, got {given}: call .{call}()")


def readable(x: Tensor) -> bool:
    """Whether reading the values costs no waiting, and there are any: not within a transform."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_axes(name: str, x: Tensor, axes: str, *counts: int) -> None:
    check_dense(name, x, f" {axes}")
    if x.ndim not in counts:
        raise ValueError(f"{name} must have {counts[0]} axes {axes}, got {shape(x)}")


def check_sequence(q: Tensor, k: Tensor, v: Tensor, n_steps: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, "[B, T, heads, channels]", 4)
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}: "
                "q, k and v share one dtype and one device"
            )
    batch, tokens, heads, key_size = q.shape
    if heads == 0 or key_size == 0 or v.shape[3] == 0:
        raise ValueError(f"q and v need at least one head and one channel, got {shape(q, v)}")
    if k.shape != (batch, tokens * n_steps, heads, key_size):
        expected = [batch, tokens * n_steps, heads, key_size]
        raise ValueError(
            f"k must be [B, T*n, H, K] = {expected} for q {shape(q)} and n_steps={n_steps}, "
            f"got {shape(k)}"
        )
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must start with [B, T*n] = {list(k.shape[:2])} like k, got {shape(v)}")
    if v.shape[2] == 0 or v.shape[2] % heads:
        raise ValueError(
            f"v must have a multiple of the {heads} heads of q and k, got {v.shape[2]}: "
            "value head h reads key head h * H // HV"
        )


def check_gate(
    name: str, gate: Tensor | None, q: Tensor, expected: Mapping[str, tuple[int, ...]]
) -> None:
    if gate is None:
        return
    check_dense(name, gate, " or None")
    if tuple(gate.shape) not in expected.values():
        choices = " or ".join(f"{letters} = {list(size)}" for letters, size in expected.items())
        raise ValueError(f"{name} must be {choices}, got {shape(gate)}")
    if gate.dtype not in FLOATS:
        raise ValueError(f"{name} must be a floating-point tensor, got {gate.dtype}")
    if gate.device != q.device:
        raise ValueError(f"{name} is on {gate.device}, but q is on {q.device}")


def check_scale(scale: object) -> float:
    """A number, in compiled code perhaps a symbol for one."""
    if isinstance(scale, bool) or not isinstance(scale, Real | torch.SymFloat):
        why = "to scale by a tensor, multiply q with it"
        raise ValueError(f"scale must be a number or None, got {type(scale).__name__}: {why}")
    return float(scale)


def check_log_decay(log_decay: Tensor | None, q: Tensor, heads: int) -> None:
    """The three shapes of a decay, and the precision that a product of many decays needs."""
    if log_decay is None:
        return
    batch, tokens, _, key_size = q.shape
    shapes = {"[HV]": (heads,), "[B, T, HV]": (batch, tokens, heads)}
    shapes |= {"[B, T, HV, K]": (batch, tokens, heads, key_size)}
    check_gate("log_decay", log_decay, q, shapes)
    check_exact("log_decay", log_decay)


def check_exact(name: str, decay: Tensor | None) -> None:
    if decay is not None and decay.dtype not in (torch.float32, torch.float64):
        why = "lower precision rounds a slow decay to none; compute it with .float()"
        raise ValueError(f"{name} must be float32 (or float64), got {decay.dtype}: {why}")


def check_state(
    name: str, state: Tensor | None, q: Tensor, expected: tuple[int, ...],
    letters: str = "[N, HV, V, K]",
) -> None:  # fmt: skip
    if state is None:
        return
    check_gate(name, state, q, {letters: expected})
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    if state.dtype != wanted:
        raise ValueError(f"{name} must be {wanted} for q in {q.dtype}, got {state.dtype}")


def shape(*tensors: Tensor) -> str:
    """Shapes as a reader writes them: [2, 3] and [4]."""
    return " and ".join(str(list(x.shape)) for x in tensors)


def check_flags(flags: Mapping[str, object]) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
