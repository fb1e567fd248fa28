"""vLLM's Gated DeltaNet on these operators: the prefill's class and two functions of its layer.

Entry point `vllm.general_plugins`; it acts where VLLM_PLUGINS names `deltarule`. Written against
the contract of vLLM 0.33, and not run within it.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deltarule.ops import delta_rule
from deltarule.ops.serving.step import pool_step
from deltarule.serve.packed import asked_for, logits, split_heads

LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
# Blocks of the cache from 1 on are in use.
NULL = 0


def register() -> None:
    """Put our functions in the place of the engine's, if VLLM_PLUGINS asks for them."""
    if not asked_for("VLLM_PLUGINS"):
        return
    layer = import_module(LAYER)
    operators = import_module("vllm.model_executor.custom_op").CustomOp
    # Modules of the engine, whose attributes no type names.
    engine: Any = layer

    @operators.register_oot(name="ChunkGatedDeltaRule")
    class DeltaruleChunk(engine.ChunkGatedDeltaRule):  # type: ignore[misc]
        """The prefill of Gated DeltaNet."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._forward_method = chunk_gated_delta_rule

    engine.fused_recurrent_gated_delta_rule_packed_decode = packed_decode
    engine.fused_sigmoid_gating_delta_rule_update = decode


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True, core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Prompts from states [N, HV, V, K] that the caller gathered -> o, states in their dtype."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = delta_rule(
        q, k, v, beta=beta, log_decay=g.to(dtype), normalize_qk=use_qk_l2norm_in_kernel,
        initial_state=initial_state.to(dtype), cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if core_attn_out is not None:
        core_attn_out.view(-1)[: out.o.numel()].copy_(out.o.reshape(-1))
    assert out.final_state is not None
    return out.o, out.final_state.to(initial_state.dtype) if output_final_state else None


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    initial_state: Tensor, out: Tensor, ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each request, out [N, 1, HV, V]; the pool is written."""
    q, k, v = split_heads(mixed_qkv, initial_state)
    pool_step(
        q, k, v, **logits(a, b, A_log, dt_bias, v), scale=scale,
        normalize_qk=use_qk_l2norm_in_kernel, state=initial_state,
        state_indices=ssm_state_indices[: len(q)], null_index=NULL, out=out,
    )  # fmt: skip
    return out, initial_state


def decode(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor,
    beta: float = 1.0, threshold: float = 20.0, scale: float | None = None,
    initial_state: Tensor | None = None, inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A few tokens of each request, drafted ones perhaps; the pool is written."""
    if initial_state is None or ssm_state_indices is None or not inplace_final_state or beta != 1.0:
        raise ValueError(
            "deltarule's decode takes a pool with ssm_state_indices, inplace_final_state=True and "
            "beta=1.0: leave deltarule out of VLLM_PLUGINS for another call"
        )
    rows = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    slots, accepted = ssm_state_indices[:rows], num_accepted_tokens
    if slots.ndim == 2 and accepted is not None:
        accepted = accepted[:rows]
    o = pool_step(
        q, k, v, **logits(a, b, A_log, dt_bias, v, q.shape[3] if is_kda else None), scale=scale,
        normalize_qk=use_qk_l2norm_in_kernel, state=initial_state, state_indices=slots,
        accepted=accepted if slots.ndim == 2 else None, null_index=NULL, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, initial_state
