"""The plugins beside the engines' own Triton functions, on a CPU, in Triton's interpreter.

    pip download --no-deps -d WHEELS sglang==0.5.23 vllm==0.33.0
    TRITON_INTERPRET=1 PYTHONPATH=src:tests python tests/serve/beside_engines.py WHEELS

Neither engine starts here: both wheels are built for CUDA. Their kernels are Python, and so are
SGLang's registry of plugins and the class that it replaces.
"""

import contextlib
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
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from deltarule.serve import sglang, vllm
from serve.test_engines import A_LOG, BIAS, HV, K, V, drawn, gates, mixed, pool_of
from tolerance import relative_rms

# Modules of which a kernel wants to know what machine it runs on: none of those it asks for.
UNKNOWN = (
    "einops", "sglang.kernels.jit.utils", "sglang.srt.utils", "sglang.srt.utils.common",
    "vllm.envs", "vllm.logger", "vllm.platforms", "vllm.utils", "vllm.utils.gpu_sync_debug",
    "vllm.utils.torch_utils",
)  # fmt: skip
SLOTS = [3, 1, 4]
# Where the prompts of a prefill begin and the last ends.
PROMPTS = torch.tensor([0, 70, 71, 135], dtype=torch.int32)
# Their chunks of 64 tokens, as vLLM counts them for all layers: prompt and place, and the first.
CHUNKS = torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0]], dtype=torch.int32)
FIRST = torch.tensor([0, 2, 3, 4], dtype=torch.int32)


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


def counted(end):
    """A loop whose index is a tensor, as in a compiled kernel; the interpreter has integers."""
    return (tl.full((), i, tl.int32) for i in range(end))


def unpack(wheels: Path, into: str) -> None:
    """Lay out the modules of the wheels, without what their packages do when they are imported."""
    for wheel in wheels.glob("*.whl"):
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(into, [x for x in names if not x.endswith("__init__.py")])
    sys.path.append(into)
    sys.modules |= {name: Unknown(name) for name in UNKNOWN}
    sys.modules["sglang.srt.utils.common"].torch_release = (2, 13)
    # SGLang makes the device of its tensors current, and a CPU is always.
    torch.cpu.device = lambda _: contextlib.nullcontext()
    known = sys.modules["vllm.triton_utils"] = ModuleType("vllm.triton_utils")
    known.tl, known.triton, known.tldevice = tl, triton, libdevice


def kernels(name: str) -> ModuleType:
    """A module of an engine, with an `exp` and constants of launches that the interpreter takes."""
    module = importlib.import_module(name)
    for other in list(sys.modules.values()):
        if getattr(other, "exp", None) is tl.exp and other is not tl:
            other.exp = exp
        if str(getattr(other, "__name__", "")).startswith(("sglang.", "vllm.")):
            for kernel in vars(other).values():
                take_first_constants(kernel)
    return module


def take_first_constants(kernel: object) -> None:
    """Choose among the constants of a kernel's launches, which Triton would time on a GPU."""
    while isinstance(kernel, KernelInterface):
        if isinstance(kernel, Autotuner):
            del kernel.configs[1:]
        kernel = kernel.fn


def compare(title: str, sides, call) -> None:
    """Call both with pools of their own; print how far they are apart, and refuse much."""
    torch.manual_seed(0)
    pools = [pool_of(9)[0].clone() for _ in range(2)]
    pools[1].copy_(pools[0])
    found = [call(side, pool) for side, pool in zip(sides, pools, strict=True)]
    pairs = found, pools, *zip(*KEPT, strict=True)
    apart = [relative_rms(*(x.flatten() for x in pair)) for pair in pairs]
    print(f"{title}: outputs, states, what else is kept:", *(f"{x:.1e}" for x in apart), flush=True)
    assert max(apart) < 1e-6
    KEPT[:] = [], []


# States of drafts and of chunks, from either side of a comparison.
KEPT: list[list[torch.Tensor]] = [[], []]


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
    (q, k, v, a, b), offsets = drawn(3), torch.arange(4, dtype=torch.int32)
    call = {"A_log": A_LOG, "dt_bias": BIAS, "cache_indices": torch.tensor(SLOTS).int()}
    packed = {"scale": K**-0.5, "num_v_heads": HV, "head_v_dim": V, **call}
    compare("SGLang decode", sides, lambda side, pool: side.decode(
        q, k, v, a, b, ssm_states=pool, query_start_loc=offsets, **call
    ))  # fmt: skip
    compare("SGLang packed_decode", sides, lambda side, pool: side.packed_decode(
        mixed(q, k, v), a, b, ssm_states=pool, **packed
    ))  # fmt: skip
    drafts = drawn(6)

    def verified(side, pool):
        buffer = torch.zeros(4, 3, HV, V, K)
        KEPT[side is sides[1]].append(buffer)
        return side.target_verify(
            A_LOG, BIAS, *drafts, ssm_states=pool, query_start_loc=offsets[:3] * 3,
            cache_indices=call["cache_indices"][:2], intermediate_states_buffer=buffer,
            intermediate_state_indices=offsets[1:3], cache_steps=3, retrieve_parent_token=None,
        )  # fmt: skip

    compare("SGLang target_verify", sides, verified)
    # In bfloat16 the interpreter multiplies bits as if they were integers, and in float32 the
    # function that `extend` calls refuses to run: what it calls is called.
    chain = kernels("sglang.kernels.ops.attention.fla.chunk").ChunkGatedDeltaRuleFunction.apply
    (q, k, v, a, b), slots = drawn(PROMPTS[-1]), call["cache_indices"]
    g, beta = (x[None] for x in gates(a, b))

    def extended(side, pool):
        if side is sides[0]:
            o, _, states = side.extend(
                q, k, v, g, beta, ssm_states=pool, cache_indices=slots, query_start_loc=PROMPTS
            )
        else:
            o, states = chain(q, k, v, g, beta, K**-0.5, pool, slots, PROMPTS, True)
        KEPT[side is sides[1]].append(states)
        return o

    compare("SGLang extend", sides, extended)


def check_vllm() -> None:
    """Its two functions of a layer, and what its prefill calls, which itself refuses float32."""
    place = "vllm.third_party.flash_linear_attention.ops"
    whole = kernels(f"{place}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    gated = kernels(f"{place}.fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update
    q, k, v, a, b = drawn(3)
    out, slots = torch.zeros(3, 1, HV, V), torch.tensor(SLOTS).int()
    compare("vLLM packed decode", (vllm.packed_decode, whole), lambda decode, pool: decode(
        mixed(q, k, v), a, b, A_LOG, BIAS, K**-0.5, pool, out.clone(), slots, True
    )[0])  # fmt: skip
    rows = {
        "cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32),
        "ssm_state_indices": torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([2, 1], dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
    }
    compare("vLLM drafts", (vllm.decode, gated), lambda decode, pool: decode(
        A_LOG, a, b, BIAS, q, k, v, initial_state=pool, **rows
    )[0])  # fmt: skip
    chain = kernels(f"{place}.chunk").chunk_gated_delta_rule_fwd
    kernels(f"{place}.chunk_delta_h").range = counted
    norm = kernels(f"{place}.l2norm").l2norm_fwd
    q, k, v, a, b = drawn(PROMPTS[-1])
    q, k, g, beta = norm(q), norm(k), *(x[None] for x in gates(a, b))

    def filled(prefill, pool):
        start = pool[SLOTS]
        if prefill is chain:
            given = K**-0.5, start, True, PROMPTS, CHUNKS, FIRST
            _, o, _, pool[SLOTS], *_ = chain(q, k, v, g, beta, *given)
        else:
            given = start, True, PROMPTS
            o, pool[SLOTS] = prefill(q, k, v, g, beta, *given, use_qk_l2norm_in_kernel=False)
        return o

    compare("vLLM prefill", (vllm.chunk_gated_delta_rule, chain), filled)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(sys.argv[1]), folder)
        check_sglang()
        check_vllm()
