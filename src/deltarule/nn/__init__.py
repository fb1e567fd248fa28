"""Layers: recurrent mixers, attention, norm, MLP, and the states they carry."""

from deltarule.nn.attention import Attention, SlidingWindowAttention
from deltarule.nn.delta_product import DeltaProduct, GatedDeltaProduct
from deltarule.nn.deltanet import DeltaNet
from deltarule.nn.gated_deltanet import GatedDeltaNet
from deltarule.nn.gla import GatedLinearAttention
from deltarule.nn.interface import Mixer, MixerConfig
from deltarule.nn.kda import KDA
from deltarule.nn.lightning import Lightning
from deltarule.nn.linear_attention import LinearAttention
from deltarule.nn.longhorn import Longhorn
from deltarule.nn.mamba2 import Mamba2
from deltarule.nn.mixer import RecurrentMixer
from deltarule.nn.mlp import SwiGLU
from deltarule.nn.norm import RMSNorm
from deltarule.nn.retnet import RetNet
from deltarule.nn.rwkv7 import RWKV7
from deltarule.nn.short_conv import ShortConv
from deltarule.nn.state import ModelState, State, load_state, save_state

MIXERS: dict[str, type[Mixer]] = {
    "linear_attention": LinearAttention,
    "retnet": RetNet,
    "lightning": Lightning,
    "mamba2": Mamba2,
    "gla": GatedLinearAttention,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KDA,
    "delta_product": DeltaProduct,
    "gated_delta_product": GatedDeltaProduct,
    "longhorn": Longhorn,
    "rwkv7": RWKV7,
    "attention": Attention,
    "sliding_window": SlidingWindowAttention,
}

__all__ = [
    "KDA",
    "MIXERS",
    "RWKV7",
    "Attention",
    "DeltaNet",
    "DeltaProduct",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "Lightning",
    "LinearAttention",
    "Longhorn",
    "Mamba2",
    "Mixer",
    "MixerConfig",
    "ModelState",
    "RMSNorm",
    "RecurrentMixer",
    "RetNet",
    "ShortConv",
    "SlidingWindowAttention",
    "State",
    "SwiGLU",
    "load_state",
    "save_state",
]
