"""The plugins beside loops over one request, called as the engines call them; no engine is here."""

import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from deltarule import delta_rule
from deltarule.serve import sglang, vllm
from tolerance import assert_close, relative_rms

H, HV, K, V = 2, 4, 16, 24
A_LOG, BIAS = torch.linspace(-1, 0, HV), torch.linspace(-2, 2, HV)


def drawn(tokens: int):
    """q, k, v [1, T, heads, channels] and logits a, b [T, HV]."""
    q, k = torch.randn(2, 1, tokens, H, K)
    return q, k, torch.randn(1, tokens, HV, V), *torch.randn(2, tokens, HV)


def gates(a, b):
    return -A_LOG.exp() * F.softplus(a + BIAS), b.sigmoid()


def alone(q, k, v, a, b, first: int, last: int, state):
    """Outputs, and the state after each token, of one request from state [HV, V, K]."""
    g, beta = (x[None].double() for x in gates(a, b))
    outputs, states, at = [], [], state[None].double()
    for t in range(first, last):
        now = slice(t, t + 1)
        o, at = delta_rule(
            *(x[:, now].double() for x in (q, k, v)), beta=beta[:, now], log_decay=g[:, now],
            normalize_qk=True, initial_state=at, impl="reference",
        )  # fmt: skip
        outputs.append(o[0, 0])
        states.append(at[0])
    return torch.stack(outputs), torch.stack(states)


def pool_of(slots: int):
    """A pool with a gap after each slot, and a copy."""
    pool = torch.randn(slots, HV * V * K + 40)[:, : HV * V * K].view(slots, HV, V, K)
    return pool, pool.clone()


def close(x, expected) -> None:
    assert_close(x, expected, dtype=torch.float32)


class Engine:
    """SGLang's own kernel: what ours leaves to it."""

    def packed_decode(self, *given, **named):
        return "engine"

    target_verify = packed_decode


KERNEL = sglang.kernel_class(Engine)()


def test_sglang_extends_and_hands_out_the_states_of_chunks() -> None:
    given, offsets = drawn(201), torch.tensor([0, 70, 71, 201], dtype=torch.int32)
    (q, k, v, a, b), (pool, before) = given, pool_of(9)
    g, beta = (x[None] for x in gates(a, b))
    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    call = {"cache_indices": slots, "query_start_loc": offsets}
    untouched = pool.clone()
    KERNEL.extend(q, k, v, g, beta, ssm_states=untouched, inplace_update=False, **call)
    assert torch.equal(untouched, before)
    o, last, states = KERNEL.extend(q, k, v, g, beta, ssm_states=pool, **call)
    starts = before[5], torch.zeros(HV, V, K), before[2]
    ends = pairwise(offsets.tolist())
    exact = [alone(*given, *pair, start) for pair, start in zip(ends, starts, strict=True)]
    assert last is None
    close(o[0], torch.cat([x for x, _ in exact]))
    close(pool[[5, 2]], torch.stack([exact[0][1][-1], exact[2][1][-1]]))
    others = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(pool[others], before[others])
    wanted = [starts[0], exact[0][1][63], starts[1], starts[2], *exact[2][1][[63, 127]]]
    assert states.shape == (1, 6, HV, V, K)
    close(states[0], torch.stack([x.double() for x in wanted]))


def test_chunks_are_counted_anew_where_offsets_change_in_place() -> None:
    offsets = torch.tensor([0, 70, 71])
    starts = sglang.chunk_starts(offsets)
    assert starts.tolist() == [0, 64, 70]
    assert sglang.chunk_starts(offsets) is starts
    offsets[1] = 64
    assert sglang.chunk_starts(offsets).tolist() == [0, 64]
    with torch.inference_mode():
        offsets = torch.tensor([0, 70, 71])
        assert sglang.chunk_starts(offsets).tolist() == [0, 64, 70]
        offsets[1] = 64
        assert sglang.chunk_starts(offsets).tolist() == [0, 64]


def check_decoded(given, o, pool, before, slots, null: int) -> None:
    for row, slot in enumerate(slots):
        if slot <= null:
            assert (o[row] == 0).all()
            continue
        outputs, states = alone(*given, row, row + 1, before[slot])
        close(o[row], outputs[0])
        close(pool[slot], states[0])
    others = [slot for slot in range(len(pool)) if slot not in slots or slot <= null]
    assert torch.equal(pool[others], before[others])


def mixed(q, k, v):
    return torch.cat([x[0].flatten(1) for x in (q, k, v)], -1)


def test_sglang_decodes() -> None:
    q, k, v, a, b = given = drawn(3)
    slots = [3, -1, 0]
    call = {"A_log": A_LOG, "dt_bias": BIAS, "cache_indices": torch.tensor(slots)}
    pool, before = pool_of(5)
    o = KERNEL.decode(q, k, v, a, b, ssm_states=pool, query_start_loc=torch.arange(4), **call)
    check_decoded(given, o[0], pool, before, slots, -1)
    pool, before = pool_of(5)
    call |= {"scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V, "ssm_states": pool}
    o = KERNEL.packed_decode(mixed(q, k, v), a, b, **call)
    assert o.shape == (1, 3, HV, V)
    check_decoded(given, o[0], pool, before, slots, -1)
    assert KERNEL.packed_decode(mixed(q, k, v), a, b, replayssm_d=1, **call) == "engine"


def test_sglang_verifies_a_chain_and_leaves_trees_to_the_engine() -> None:
    given, (pool, before) = drawn(6), pool_of(5)
    buffer = torch.zeros(4, 5, HV, V, K)
    call = {
        "ssm_states": pool, "cache_indices": torch.tensor([4, 1]), "cache_steps": 5,
        "query_start_loc": torch.tensor([0, 3, 6]), "intermediate_states_buffer": buffer,
        "intermediate_state_indices": torch.tensor([2, 0]),
    }  # fmt: skip
    o = KERNEL.target_verify(A_LOG, BIAS, *given, retrieve_parent_token=None, **call)
    for row, (slot, place) in enumerate(((4, 2), (1, 0))):
        outputs, states = alone(*given, 3 * row, 3 * row + 3, before[slot])
        close(o[0, 3 * row : 3 * row + 3], outputs)
        close(buffer[place, :3], states)
    assert torch.equal(pool, before)
    assert (buffer[[1, 3]] == 0).all()
    tree = torch.tensor([[-1, 0, 0], [-1, 0, 1]])
    found = KERNEL.target_verify(A_LOG, BIAS, *given, retrieve_parent_token=tree, **call)
    assert found == "engine"


def test_vllm_prefills() -> None:
    given, offsets = drawn(75), torch.tensor([0, 70, 75], dtype=torch.int32)
    q, k, v, a, b = given
    g, beta = (x[None] for x in gates(a, b))
    start, room = torch.randn(2, HV, V, K).bfloat16(), torch.zeros(100, HV, V)
    o, states = vllm.chunk_gated_delta_rule(
        q, k, v, g, beta, start, True, cu_seqlens=offsets, core_attn_out=room
    )
    for row, (first, last) in enumerate(pairwise(offsets.tolist())):
        outputs, after = alone(*given, first, last, start[row])
        close(o[0, first:last], outputs)
        assert states.dtype == torch.bfloat16
        assert relative_rms(states[row], after[-1]) < 2**-8
    assert torch.equal(room[:75], o[0])


def test_vllm_decodes() -> None:
    given, slots = drawn(4), [3, 0, 7, 1]
    q, k, v, a, b = given
    pool, before = pool_of(9)
    out = torch.empty(4, 1, HV, V)
    indices = torch.tensor(slots, dtype=torch.int32)
    vllm.packed_decode(mixed(q, k, v), a, b, A_LOG, BIAS, K**-0.5, pool, out, indices, True)
    check_decoded(given, out[:, 0], pool, before, slots, 0)
    with pytest.raises(ValueError, match=r"leave deltarule out of VLLM_PLUGINS"):
        vllm.decode(A_LOG, a, b, BIAS, q, k, v, inplace_final_state=False)


def test_vllm_checks_drafts() -> None:
    given, (pool, before) = drawn(5), pool_of(9)
    q, k, v, a, b = given
    slots = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    o, same = vllm.decode(
        A_LOG, a, b, BIAS, q, k, v, initial_state=pool, cu_seqlens=torch.tensor([0, 3, 5]),
        ssm_state_indices=slots, num_accepted_tokens=torch.tensor([2, 1]),
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert same is pool
    first, second = alone(*given, 0, 3, before[2]), alone(*given, 3, 5, before[4])
    close(o[0], torch.cat([first[0], second[0]]))
    close(pool[1:6], torch.cat([first[1], second[1]]))
    assert torch.equal(pool[[0, 6, 7, 8]], before[[0, 6, 7, 8]])


def modules(monkeypatch, **found: object) -> None:
    """Stand-ins for an engine's modules."""
    for name, members in found.items():
        module = ModuleType(name)
        vars(module).update(vars(members))
        monkeypatch.setitem(sys.modules, name, module)


def test_plugins_act_where_the_engine_lists_them(monkeypatch) -> None:
    hooks, classes = [], {}

    class Chunk:
        def __init__(self):
            self._forward_method = None

    layer = SimpleNamespace(ChunkGatedDeltaRule=Chunk)
    registry = SimpleNamespace(register=lambda *given: hooks.append(given))
    kernels = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
    custom = SimpleNamespace(
        register_oot=lambda *, name: lambda found: classes.setdefault(name, found)
    )
    modules(monkeypatch, **{
        "sglang.srt.plugins.hook_registry": SimpleNamespace(
            HookRegistry=registry, HookType=SimpleNamespace(REPLACE="replace")
        ),
        kernels: SimpleNamespace(TritonGDNKernel=Engine), vllm.LAYER: layer,
        "vllm.model_executor.custom_op": SimpleNamespace(CustomOp=custom),
    })  # fmt: skip
    for switch in ("SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(switch, raising=False)
    sglang.register()
    vllm.register()
    assert not hooks
    assert not classes
    monkeypatch.setenv("SGLANG_PLUGINS", "other, deltarule")
    monkeypatch.setenv("VLLM_PLUGINS", "deltarule")
    sglang.register()
    vllm.register()
    (place, ours, how), replaced = hooks[0], sys.modules[vllm.LAYER]
    assert (place, how) == (sglang.PLACE, "replace")
    assert issubclass(ours, Engine)
    assert classes["ChunkGatedDeltaRule"]()._forward_method is vllm.chunk_gated_delta_rule
    assert replaced.fused_recurrent_gated_delta_rule_packed_decode is vllm.packed_decode
    assert replaced.fused_sigmoid_gating_delta_rule_update is vllm.decode


def test_entry_points_name_functions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]
    assert points["sglang.srt.plugins"] == {"deltarule": f"{sglang.register.__module__}:register"}
    assert points["vllm.general_plugins"] == {"deltarule": f"{vllm.register.__module__}:register"}
