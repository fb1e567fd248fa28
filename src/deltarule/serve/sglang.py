"""SGLang's Gated DeltaNet on these operators: one class in the place of `TritonGDNKernel`.

Entry point `sglang.srt.plugins`; it acts where SGLANG_PLUGINS names `deltarule`. Written against
the contract of SGLang 0.5.23, and not run within it.
"""

from collections.abc import MutableMapping
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from deltarule.ops import recurrent_step
from deltarule.ops.chunks import CHUNK_ROWS
from deltarule.ops.few_tokens import MAX_TOKENS
from deltarule.ops.serving.pool import read, write
from deltarule.ops.serving.prefill import pool_prefill
from deltarule.ops.serving.step import pool_step
from deltarule.serve.packed import asked_for, logits, split_heads

PLACE = "sglang.srt.layers.attention.linear.gdn_backend.TritonGDNKernel"
NULL = -1


def register() -> None:
    """Put our kernels in the place of the engine's, if SGLANG_PLUGINS asks for them."""
    if not asked_for("SGLANG_PLUGINS"):
        return
    hooks = import_module("sglang.srt.plugins.hook_registry")
    kernels = import_module("sglang.srt.layers.attention.linear.kernels.gdn_triton")
    hooks.HookRegistry.register(
        PLACE, kernel_class(kernels.TritonGDNKernel), hooks.HookType.REPLACE
    )


# By the offsets: how often they had been written, and where their chunks began.
_known: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()


def chunk_starts(offsets: Tensor) -> Tensor:
    """The first token of every 64 of every sequence: read once for all layers of a pass."""
    # A tensor of inference mode does not count how often it was written: it is read every time.
    version = None if offsets.is_inference() else offsets._version
    known, borders = _known.get(offsets, (None, offsets))
    if version is None or version != known:
        ends = pairwise(offsets.tolist())
        starts = [x for first, end in ends for x in range(first, end, CHUNK_ROWS)]
        borders = torch.tensor(starts, dtype=torch.int64).to(offsets.device)
        if version is not None:
            _known[offsets] = version, borders
    return borders


# The engine's methods take keywords that belong to other kernels; they are passed on to its own.


def kernel_class(engine: type) -> type:
    """A subclass of the engine's kernel; what ours does not do stays the engine's."""

    class DeltaruleGDNKernel(engine):  # type: ignore[misc]
        """Gated DeltaNet for SGLang."""

        supports_packed_decode = True

        def packed_decode(
            self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
            scale: float, ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int,
            head_v_dim: int, **others: Any,
        ) -> Tensor:  # fmt: skip
            """One token of each request -> [1, N, HV, V]."""
            if others.get("replayssm_d") is not None:
                kept: Tensor = super().packed_decode(
                    mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale,
                    ssm_states=ssm_states, cache_indices=cache_indices, num_v_heads=num_v_heads,
                    head_v_dim=head_v_dim, **others,
                )  # fmt: skip
                return kept
            q, k, v = split_heads(mixed_qkv, ssm_states)
            gates = logits(a, b, A_log, dt_bias, v)
            o = pool_step(
                q, k, v, **gates, scale=scale, normalize_qk=True, state=ssm_states,
                state_indices=cache_indices, null_index=NULL,
            )  # fmt: skip
            return o.transpose(0, 1)

        def decode(
            self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor,
            dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
            **others: Any,
        ) -> Tensor:  # fmt: skip
            """A few tokens of each request, packed [1, T, H, K] -> [1, T, HV, V]."""
            return pool_step(
                q, k, v, **logits(a, b, A_log, dt_bias, v), normalize_qk=True, state=ssm_states,
                state_indices=cache_indices, null_index=NULL, cu_seqlens=query_start_loc,
            )  # fmt: skip

        def extend(
            self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
            cache_indices: Tensor, query_start_loc: Tensor, inplace_update: bool = True,
            **others: Any,
        ) -> tuple[Tensor, None, Tensor]:  # fmt: skip
            """Prompts -> outputs, None, and the states at the starts of chunks in k's dtype."""
            writes = cache_indices if inplace_update else torch.full_like(cache_indices, NULL)
            o, states = pool_prefill(
                q, k, v, beta=beta, log_decay=g.float(), normalize_qk=True, state=ssm_states,
                state_indices=cache_indices, write_indices=writes, null_index=NULL,
                cu_seqlens=query_start_loc, borders=chunk_starts(query_start_loc),
            )  # fmt: skip
            assert states is not None
            return o, None, states.to(k.dtype).unsqueeze(0)

        def target_verify(
            self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
            b: Tensor, *, ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
            intermediate_states_buffer: Tensor, intermediate_state_indices: Tensor,
            cache_steps: int, retrieve_parent_token: Tensor | None, **others: Any,
        ) -> Tensor:  # fmt: skip
            """Drafted tokens in a chain: the pool is read, the state after each is kept apart."""
            rows = len(cache_indices)
            tokens = q.shape[1] // rows
            if retrieve_parent_token is not None or tokens > MAX_TOKENS:
                kept: Tensor = super().target_verify(
                    A_log, dt_bias, q, k, v, a, b, ssm_states=ssm_states,
                    cache_indices=cache_indices, query_start_loc=query_start_loc,
                    intermediate_states_buffer=intermediate_states_buffer,
                    intermediate_state_indices=intermediate_state_indices,
                    cache_steps=cache_steps, retrieve_parent_token=retrieve_parent_token, **others,
                )  # fmt: skip
                return kept
            q, k, v = (x.view(rows, tokens, *x.shape[2:]) for x in (q, k, v))
            dtype = torch.promote_types(q.dtype, torch.float32)
            start = read(ssm_states, cache_indices, NULL, dtype)
            states = start.new_empty(rows, tokens, *start.shape[1:])
            o = recurrent_step(
                q, k, v, **logits(a, b, A_log, dt_bias, v), normalize_qk=True, state=start,
                states=states,
            )  # fmt: skip
            room = intermediate_states_buffer[:, :tokens].flatten(3)
            write(room, intermediate_state_indices, NULL, states.flatten(3))
            return o.view(1, rows * tokens, *o.shape[2:])

    return DeltaruleGDNKernel
