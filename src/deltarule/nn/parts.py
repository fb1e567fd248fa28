"""What every recurrent layer is made of: its options, checked, and the modules they call for."""

from typing import ClassVar, Self

from torch import nn

from deltarule.nn.arguments import (
    above_zero,
    check_beta_max,
    check_depth,
    check_maps,
    check_multiple,
    check_n_steps,
    default,
    default_head_dim,
    positive,
)
from deltarule.nn.interface import Mixer, MixerConfig
from deltarule.nn.norm import Activation, GatedRMSNorm, GateOnly
from deltarule.nn.query_key_map import QueryKeyMap, check_divides, check_norm
from deltarule.nn.rule import QueryKeyNorm, Rule
from deltarule.nn.short_conv import ShortConv


class RecurrentParts(Mixer):
    """The constructor of `RecurrentMixer`, which describes the arguments."""

    rule: ClassVar[Rule]
    expand_k: ClassVar[float] = 1.0
    expand_v: ClassVar[int] = 1
    default_conv_size: ClassVar[int] = 0
    default_output_gate: ClassVar[bool] = False
    default_beta_max: ClassVar[float] = 1.0
    default_n_steps: ClassVar[int] = 1
    # Whether feature_map and qk_norm are options, and what q and k go through where none is given.
    maps_features: ClassVar[bool] = False
    # Whether a free erase has a strength that beta_max bounds.
    frees_strength: ClassVar[bool] = False
    default_feature_map: ClassVar[str | None] = None
    gate_activation: ClassVar[Activation] = "silu"
    # SiLU on q, k and v where no convolution brings its own.
    activates_projections: ClassVar[bool] = False
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")
    save_states: bool = True

    A_log: nn.Parameter | None
    dt_bias: nn.Parameter | None
    D: nn.Parameter | None
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    a_proj: nn.Module | None
    b_proj: nn.Module | None
    g_proj: nn.Module | None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_v_heads: int | None = None,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        output_gate: bool | None = None,
        beta_max: float | None = None,
        n_steps: int | None = None,
        feature_map: str | None = None,
        qk_norm: QueryKeyNorm | None = None,
        normalizer: bool | None = None,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        """Build the projections, the convolutions, the gates and the norm."""
        super().__init__()
        self.hidden_size = positive("hidden_size", hidden_size)
        self.num_heads = positive("num_heads", num_heads)
        self.num_v_heads = positive("num_v_heads", default(num_v_heads, num_heads))
        check_multiple("num_v_heads", self.num_v_heads, "num_heads", num_heads)
        head_k_dim = self.default_head_k_dim() if head_k_dim is None else head_k_dim
        self.head_k_dim = positive("head_k_dim", head_k_dim)
        head_v_dim = self.default_head_v_dim() if head_v_dim is None else head_v_dim
        self.head_v_dim = positive("head_v_dim", head_v_dim)
        beta_max = check_beta_max(beta_max, self.rule, self.takes("beta_max"))
        self.beta_max = default(beta_max, self.default_beta_max)
        self.n_steps = check_n_steps(n_steps, self.rule, self.default_n_steps)
        self.norm_eps = above_zero("norm_eps", norm_eps)
        self.layer_index, self.num_layers = check_depth(layer_index, num_layers)
        conv_size = default(conv_size, self.default_conv_size)
        self.conv_size = positive("conv_size", conv_size) if conv_size != 0 else 0
        check_maps(self.rule, self.maps_features, feature_map, qk_norm, normalizer)
        self.qk_norm = check_norm(qk_norm)
        self.normalizer = default(normalizer, self.rule.normalizer)
        name = default(feature_map, self.default_feature_map)
        key_heads = self.heads_of("k")
        self.qk_map = None if name is None else QueryKeyMap(name, key_heads, self.head_k_dim)
        if self.maps_features:
            check_divides(self.normalizer, name)
        self.check_options()
        self.build_projections()
        self.build_gates()
        self.build_output(default(output_gate, self.default_output_gate))

    @classmethod
    def from_config(cls, config: MixerConfig, layer_index: int) -> Self:
        """Build the layer at layer_index of a model; options its rule lacks are left out."""
        return cls(
            config.hidden_size,
            num_heads=config.num_heads,
            num_v_heads=config.num_v_heads,
            head_k_dim=config.head_k_dim,
            head_v_dim=config.head_v_dim,
            conv_size=config.conv_size,
            output_gate=config.output_gate,
            beta_max=config.beta_max if cls.takes("beta_max") else None,
            n_steps=config.n_steps if cls.takes("n_steps") else None,
            feature_map=config.feature_map if cls.takes("feature_map") else None,
            qk_norm=config.qk_norm if cls.takes("qk_norm") else None,
            normalizer=config.normalizer if cls.takes("normalizer") else None,
            norm_eps=config.norm_eps,
            layer_index=layer_index,
            num_layers=config.num_layers,
        )

    def default_head_k_dim(self) -> int:
        """Channels of a key where none are given: expand_k * hidden_size / num_heads."""
        sizes = self.hidden_size, "num_heads", self.num_heads
        return default_head_dim("head_k_dim", self.expand_k, *sizes)

    def default_head_v_dim(self) -> int:
        """Channels of a value where none are given: expand_v * head_k_dim."""
        return self.expand_v * self.head_k_dim

    @classmethod
    def takes(cls, option: str) -> bool:
        """Whether an option that only some rules have means something for this one."""
        # With an erase, the sum of the keys is not what the state holds: it divides nothing.
        divides = cls.maps_features and cls.rule.erase == "none" and not cls.rule.normalizer
        return {
            "beta_max": cls.rule.erase == "tied" or cls.frees_strength,
            "n_steps": cls.default_n_steps > 1,
            "feature_map": cls.maps_features,
            "qk_norm": cls.maps_features,
            "normalizer": divides,
        }[option]

    def heads_of(self, name: str) -> int:
        """Heads of q, k, v or beta."""
        return self.num_heads if name in ("q", "k") else self.num_v_heads

    def activates(self, name: str) -> bool:
        """Whether SiLU follows the convolution of q, k or v: not where a feature map does."""
        return name == "v" or self.qk_map is None

    def check_options(self) -> None:
        """Refuse sizes that every layer has but that this one cannot follow; here none."""

    def build_projections(self) -> None:
        """Make q, k and v, n_steps times as wide where each step has its own, and their filters."""
        channels = {"q": self.head_k_dim, "k": self.head_k_dim, "v": self.head_v_dim}
        for name, size in channels.items():
            size *= self.heads_of(name) * (1 if name == "q" else self.n_steps)
            setattr(self, f"{name}_proj", nn.Linear(self.hidden_size, size, bias=False))
            if self.conv_size:
                convolution = ShortConv(size, self.conv_size, self.activates(name))
                setattr(self, f"{name}_conv", convolution)

    def build_gates(self) -> None:
        """Make what the rule's gates are computed from; here the write strength, if it erases."""
        for name in ("A_log", "dt_bias", "D"):
            self.register_parameter(name, None)
        self.a_proj = self.b_proj = None
        if self.rule.erase == "tied":
            size = self.heads_of("beta") * self.n_steps
            self.b_proj = nn.Linear(self.hidden_size, size, bias=False)

    def build_output(self, gated: bool) -> None:
        """Make the norm of each head, the gate and the output projection."""
        value_size = self.num_v_heads * self.head_v_dim
        self.o_norm: nn.Module = GatedRMSNorm(self.head_v_dim, self.norm_eps, self.gate_activation)
        if self.normalizer:
            # The norm would undo the division.
            self.o_norm = GateOnly(self.gate_activation)
        self.g_proj = self.output_gate_projection() if gated else None
        self.o_proj = nn.Linear(value_size, self.hidden_size, bias=False)

    def output_gate_projection(self) -> nn.Module:
        """From x to the gate of every output channel."""
        return nn.Linear(self.hidden_size, self.num_v_heads * self.head_v_dim, bias=False)
