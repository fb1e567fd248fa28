"""Layers: recurrent mixers, attention, norm, MLP, and the states they carry."""

from deltarule.nearest import Named
from deltarule.nn.attention import Attention, SlidingWindowAttention
from deltarule.nn.comba import Comba, CombaReleased
from deltarule.nn.delta_mixer import DeltaMixer
from deltarule.nn.delta_product import DeltaProduct, GatedDeltaProduct
from deltarule.nn.deltanet import DeltaNet
from deltarule.nn.dfw import DecayingFastWeights
from deltarule.nn.experts import Experts
from deltarule.nn.gate_loop import GateLoop
from deltarule.nn.gated_deltanet import GatedDeltaNet
from deltarule.nn.gated_deltanet2 import GatedDeltaNet2
from deltarule.nn.gated_rfa import GatedRFA
from deltarule.nn.gla import GatedLinearAttention
from deltarule.nn.hgrn import HGRN
from deltarule.nn.hgrn2 import HGRN2
from deltarule.nn.hyena import Hyena, MultiHeadHyena
from deltarule.nn.kda import KDA
from deltarule.nn.latent_attention import LatentAttention
from deltarule.nn.lightning import Lightning
from deltarule.nn.linear_attention import LinearAttention
from deltarule.nn.longhorn import Longhorn, LonghornReleased
from deltarule.nn.lru import LRU
from deltarule.nn.mamba1 import Mamba1, SignedMamba1
from deltarule.nn.mamba2 import Mamba2
from deltarule.nn.memory_mixer import MemoryMixer
from deltarule.nn.mesa import Mesa
from deltarule.nn.mixer import Mixer
from deltarule.nn.mlp import SquaredReLU, SwiGLU
from deltarule.nn.mlstm import MLSTM, XLSTM7B
from deltarule.nn.multi_head import (
    BlockDeltaNet,
    MultiHeadDeltaNet,
    MultiKeyDeltaNet,
    MultiKVDeltaNet,
    MultiQueryDeltaNet,
    MultiValueDeltaNet,
)
from deltarule.nn.norm import RMSNorm
from deltarule.nn.retnet import GatedRetNet, RetNet
from deltarule.nn.rg_lru import RGLRU
from deltarule.nn.roles import parameter_roles
from deltarule.nn.rule import Projections, Rule, System
from deltarule.nn.rwkv4 import RWKV4
from deltarule.nn.rwkv6 import RWKV6
from deltarule.nn.rwkv7 import RWKV7
from deltarule.nn.s4 import S4
from deltarule.nn.s4d import S4D
from deltarule.nn.scan_mixer import ScanMixer
from deltarule.nn.short_conv import ShortConv
from deltarule.nn.slstm import SLSTM
from deltarule.nn.state import ModelState, State, load_state, save_state
from deltarule.nn.titans import TitansLinear, TitansMLP
from deltarule.nn.titans_blocks import TitansMAC, TitansMAG, TitansMAL
from deltarule.nn.ttt import TTTMLP, TTTLinear
from deltarule.nn.two_memories import ABC, GatedSlotAttention

# In the order of the table.
_LAYERS: tuple[type[Mixer], ...] = (
    LinearAttention, GatedRFA, RetNet, GatedRetNet, Lightning, Mamba2, GatedLinearAttention,
    GateLoop, RWKV6, HGRN2, MLSTM, XLSTM7B, DeltaNet, GatedDeltaNet, KDA, GatedDeltaNet2, Comba,
    CombaReleased, DeltaProduct, GatedDeltaProduct, Longhorn, RWKV7, MultiHeadDeltaNet,
    MultiKVDeltaNet, MultiValueDeltaNet, MultiKeyDeltaNet, MultiQueryDeltaNet, BlockDeltaNet,
    Mamba1, SignedMamba1, S4, S4D, LRU, HGRN, RGLRU, RWKV4, DecayingFastWeights, LonghornReleased,
    SLSTM, Hyena, MultiHeadHyena, ABC, GatedSlotAttention, Mesa, TTTLinear, TTTMLP, TitansLinear,
    TitansMLP, TitansMAC, TitansMAG, TitansMAL, Attention, SlidingWindowAttention,
)  # fmt: skip
MIXERS: dict[str, type[Mixer]] = Named({layer.rule.name: layer for layer in _LAYERS})
# The rows of the table: every system; and those that `delta_rule` or `dplr` runs.
SYSTEMS: dict[str, System] = Named({name: layer.rule for name, layer in MIXERS.items()})
RULES: dict[str, Rule] = Named({x.name: x for x in SYSTEMS.values() if isinstance(x, Rule)})

__all__ = [
    "ABC", "HGRN", "HGRN2", "KDA", "LRU", "MIXERS", "MLSTM", "RGLRU", "RULES", "RWKV4", "RWKV6",
    "RWKV7", "S4", "S4D", "SLSTM", "SYSTEMS", "TTTMLP", "XLSTM7B", "Attention", "BlockDeltaNet",
    "Comba", "CombaReleased", "DecayingFastWeights", "DeltaMixer", "DeltaNet", "DeltaProduct",
    "Experts", "GateLoop", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProduct",
    "GatedLinearAttention", "GatedRFA", "GatedRetNet", "GatedSlotAttention", "Hyena",
    "LatentAttention", "Lightning", "LinearAttention", "Longhorn", "LonghornReleased", "Mamba1",
    "Mamba2", "MemoryMixer", "Mesa", "Mixer", "ModelState", "MultiHeadDeltaNet", "MultiHeadHyena",
    "MultiKVDeltaNet", "MultiKeyDeltaNet", "MultiQueryDeltaNet", "MultiValueDeltaNet",
    "Projections", "RMSNorm", "RetNet", "Rule", "ScanMixer", "ShortConv", "SignedMamba1",
    "SlidingWindowAttention", "SquaredReLU", "State", "SwiGLU", "System", "TTTLinear",
    "TitansLinear", "TitansMAC", "TitansMAG", "TitansMAL", "TitansMLP", "load_state",
    "parameter_roles", "save_state",
]  # fmt: skip
