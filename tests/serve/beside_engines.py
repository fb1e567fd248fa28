"""The plugins beside the engines' own Triton functions, on a CPU, in Triton's interpreter.

    pip download --no-deps -d WHEELS sglang==0.5.23 vllm==0.33.0
    TRITON_INTERPRET=1 PYTHONPATH=src:tests python tests/serve/beside_engines.py WHEELS

Neither engine starts here: both wheels are built for CUDA. Their kernels are Python, and so are
SGLang's registry of plugins and the class that it replaces.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from deltarule.serve import sglang, vllm
from serve.test_engines import A_LOG, BIAS, HV, K, V, drawn, mixed, pool_of
from tolerance import relative_rms

# Modules of which a kernel wants to know what machine it runs on: none of those it asks for.
UNKNOWN = (
    "einops", "sglang.kernels.jit.utils", "sglang.srt.utils", "sglang.srt.utils.common",
    "vllm.envs", "vllm.logger", "vllm.platforms", "vllm.utils",
)  # fmt: skip
SLOTS = [3, 1, 4]


class Unknown(ModuleType):
    """A module that has whatever it is asked for: functions that say no."""

    def __getattr__(self, name: str) -> "Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(name)

    def __call__(self, *_: object, **__: object) -> bool:
        return False


@triton.jit
def exp(x):
    """An alias of `tl.exp`, such as the kernels import, is lost on the interpreter."""
    return tl.exp(x)


def unpack(wheels: Path, into: str) -> None:
    """Lay out the modules of the wheels, without what their packages do when they are imported."""
    for wheel in wheels.glob("*.whl"):
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(into, [x for x in names if not x.endswith("__init__.py")])
    sys.path.append(into)
    sys.modules |= {name: Unknown(name) for name in UNKNOWN}
    sys.modules["sglang.srt.utils.common"].torch_release = (2, 13)
    known = sys.modules["vllm.triton_utils"] = ModuleType("vllm.triton_utils")
    known.tl, known.triton, known.tldevice = tl, triton, libdevice


def kernels(name: str) -> ModuleType:
    """A module of an engine, with an `exp` that the interpreter can call."""
    module = importlib.import_module(name)
    for other in list(sys.modules.values()):
        if getattr(other, "exp", None) is tl.exp and other is not tl:
            other.exp = exp
    return module


def compare(title: str, ours, theirs) -> None:
    """Call both with pools of their own, and print how far outputs and states are apart."""
    torch.manual_seed(0)
    pools = [pool_of(9)[0].clone() for _ in range(2)]
    pools[1].copy_(pools[0])
    found = [call(pool) for call, pool in zip((ours, theirs), pools, strict=True)]
    apart = [relative_rms(*(x.flatten() for x in pair)) for pair in (found, pools)]
    print(f"{title}: outputs {apart[0]:.1e}, states {apart[1]:.1e}", flush=True)


def check_sglang() -> None:
    """Through the engine's own registry, which replaces the class in its backend."""
    os.environ["SGLANG_PLUGINS"] = "deltarule"
    place, name = sglang.PLACE.rsplit(".", 1)
    engine = kernels("sglang.srt.layers.attention.linear.kernels.gdn_triton").TritonGDNKernel
    backend = sys.modules[place] = ModuleType(place)
    backend.TritonGDNKernel = engine
    sys.modules[place.rpartition(".")[0]].gdn_backend = backend
    sglang.register()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    sides = getattr(backend, name)(), engine()
    assert type(sides[0]) is not engine
    gates = {"A_log": A_LOG, "dt_bias": BIAS}
    q, k, v, a, b = drawn(3)
    call = gates | {"cache_indices": torch.tensor(SLOTS, dtype=torch.int32)}
    offsets = torch.arange(4, dtype=torch.int32)
    compare("SGLang decode", *(
        lambda pool, side=side: side.decode(
            q, k, v, a, b, ssm_states=pool, query_start_loc=offsets, **call
        ) for side in sides
    ))  # fmt: skip
    packed = {"scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V, **call}
    compare("SGLang packed_decode", *(
        lambda pool, side=side: side.packed_decode(
            mixed(q, k, v), a, b, ssm_states=pool, **packed
        ) for side in sides
    ))  # fmt: skip
    drafts, buffers = drawn(6), []

    def verified(pool, side):
        buffers.append(torch.zeros(4, 3, HV, V, K))
        return side.target_verify(
            A_LOG, BIAS, *drafts, ssm_states=pool, query_start_loc=offsets[:3] * 3,
            cache_indices=call["cache_indices"][:2], intermediate_states_buffer=buffers[-1],
            intermediate_state_indices=offsets[1:3], cache_steps=3, retrieve_parent_token=None,
        )  # fmt: skip

    compare("SGLang target_verify", *(lambda pool, x=side: verified(pool, x) for side in sides))
    print(f"  the states of its drafts: {relative_rms(*buffers):.1e}")


def check_vllm() -> None:
    """Its two functions of a layer; the cache's first block is no request's."""
    place = "vllm.third_party.flash_linear_attention.ops"
    whole = kernels(f"{place}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    gated = kernels(f"{place}.fused_sigmoid_gating")
    q, k, v, a, b = drawn(3)
    out, slots = torch.zeros(3, 1, HV, V), torch.tensor(SLOTS, dtype=torch.int32)
    compare("vLLM packed decode", *(
        lambda pool, decode=decode: decode(
            mixed(q, k, v), a, b, A_LOG, BIAS, K**-0.5, pool, out.clone(), slots, True
        )[0] for decode in (vllm.packed_decode, whole)
    ))  # fmt: skip
    rows = {
        "cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32),
        "ssm_state_indices": torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([2, 1], dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
    }
    compare("vLLM drafts", *(
        lambda pool, decode=decode: decode(
            A_LOG, a, b, BIAS, q, k, v, initial_state=pool, **rows
        )[0] for decode in (vllm.decode, gated.fused_sigmoid_gating_delta_rule_update)
    ))  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(sys.argv[1]), folder)
        check_sglang()
        check_vllm()
