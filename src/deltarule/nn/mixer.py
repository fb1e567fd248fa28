"""What every layer is made of: its options, checked, and the modules that they call for.

    lay out -> project -> short convolution -> operator -> norm and output gate -> project -> place

`DeltaMixer`, `ScanMixer` and `MemoryMixer` say which operator; a paper's class says the rest.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import nn

from deltarule.nn import checks
from deltarule.nn.checks import COMMON, REASONS, SPECTRA, check_that
from deltarule.nn.described import check_given, described
from deltarule.nn.frame import Frame
from deltarule.nn.norm import GatedGroupNorm, GatedRMSNorm, GateOnly
from deltarule.nn.roles import Role
from deltarule.nn.rule import OutputNorm, QueryKeyNorm, Rule
from deltarule.nn.short_conv import ShortConv


class Mixer(Frame):
    """The layer that mixes tokens in a block: `mixer(x, state) -> (y, state)`, a drop-in module.

    Every layer has this one constructor; an option that means nothing for a layer must be None.

    Args:
        hidden_size: Channels of x.
        num_heads: Query and key heads H.
        num_v_heads: Value heads HV, a multiple of num_heads. None: num_heads.
        head_k_dim: Channels K of a query or key. None: the layer's default.
        head_v_dim: Channels V of a value. None: the layer's default.
        conv_size: Taps of the short convolution; 0 removes it. None: the layer's default.
        conv_bias: Whether the short convolution adds a bias before its SiLU. None: it does not.
        output_gate: Whether to gate the output. None: the layer's default.
        beta_max: Largest write strength, in (0, 2]; 2.0 allows negative eigenvalues. None: the
            layer's default.
        n_steps: Writes for each token. None: the layer's default.
        feature_map: Function of q and k, by its name in `deltarule.nn.feature_maps`. None: the
            layer's default.
        qk_norm: Norm that divides q and k: "none", "l1", "l2". None: the rule's own choice.
        output_norm: Norm of the output: "head", each head by itself; "all", all heads together;
            "none", no norm. None: each head.
        normalizer: Whether to divide the read-out by z^T q, in place of the norm of the output.
            None: the layer's default.
        longest_horizon: Initial memory, in tokens, of the slowest head: the horizons
            1 / (exp(A_log) dt) of a layer's heads start spread from 8 tokens to this. None: the
            paper's draw.
        gate_lower_bound: Smallest log_decay L of a token, a number < 0:
            log_decay = L sigmoid(exp(A_log) (decay_logits + dt_bias)). None: no bound.
        num_slots: Slots M of each head. None: the layer's default.
        filter_size: Length L of a filter in tokens, the token itself included. None: 2048.
        mini_batch: Tokens whose inner gradients are taken at the same memory. None: 16.
        spectrum: Initial complex eigenvalues of S4D: "legs", those of HiPPO-LegS; "inv" or "lin",
            the paper's approximations of them. None: "legs".
        window: Tokens W that attention sees, or of a segment. None: 128.
        num_persistent: Learned tokens before every document. None: 4.
        rope_theta: Base of the rotary wavelengths. None: 10000.
        norm_eps: Added to the mean square in the norm of the output.
        layer_index: Which layer of the model this is, from 0.
        num_layers: Layers of the model.

    Attributes:
        save_states: Whether the states of chunks are kept for the backward pass. False computes
            them again there and keeps less memory until then; the gradients are the same.

    Raises:
        ValueError: A size is out of range, or an option means nothing for this layer.
    """

    # The options beside hidden_size and num_heads that mean something, and what None stands for.
    options: ClassVar[frozenset[str]] = COMMON
    # Channels of a key. None: expand_k times its share of the stream.
    state_size: ClassVar[int | None] = None
    # Whether a value has expand_v times its share of the stream. False: expand_v times a key's.
    shares_values: ClassVar[bool] = False
    expand_k: ClassVar[float] = 1.0
    expand_v: ClassVar[int] = 1
    default_conv_size: ClassVar[int] = 0
    default_output_gate: ClassVar[bool] = False
    default_beta_max: ClassVar[float] = 1.0
    default_n_steps: ClassVar[int] = 1
    # None: as many as a key has channels.
    default_num_slots: ClassVar[int | None] = None
    default_feature_map: ClassVar[str | None] = None
    # Sizes that rotations need to be even.
    even: ClassVar[tuple[str, ...]] = ()
    # Whether the norm of a head takes its mean out, too, and its eps if that is no option.
    centred: ClassVar[bool] = False
    fixed_eps: ClassVar[float | None] = None
    # Which projections have a bias.
    biased: ClassVar[tuple[str, ...]] = ()
    # Roles of parameters, and of all those of a submodule, that are no matrices to decay.
    roles: ClassVar[dict[str, Role]] = {"a_proj": "gate", "b_proj": "gate"}
    save_states: bool = True
    __signature__: ClassVar[inspect.Signature]

    rope_theta: float | None
    filter_size: Any
    window: Any
    num_persistent: Any

    def __init_subclass__(cls) -> None:
        """Let `help` show the options that a layer takes, as described here, and its source."""
        super().__init_subclass__()
        text, rule = inspect.cleandoc(cls.__doc__ or ""), getattr(cls, "rule", None)
        shown = dict([*inspect.signature(cls.__init__).parameters.items()][1:])
        common = cls.__init__ is Mixer.__init__ and rule is not None
        if common:
            shown = {n: p for n, p in shown.items() if p.default is p.empty or cls.takes(n)}
        if text and rule is not None:
            text, _, source = text.partition("Source:")
            if common and "Args:" not in text and DESCRIBED:
                known = {n: x for n, x in cls.defaults().items() if n in shown}
                if cls.default_feature_map is None:
                    known.pop("feature_map", None)
                said = ", ".join(known.values())
                chosen = [entry for name, entry in DESCRIBED.items() if name in shown]
                text = described(text, said, rule.state_size, chosen, cls.__name__)
            text = f"{text.rstrip()}\n\nSource:{source or f' {rule.source}.'}"
        cls.__doc__ = text or cls.__doc__
        cls.__signature__ = inspect.Signature([*shown.values()])

    @classmethod
    def defaults(cls) -> dict[str, str]:
        """What None stands for, in words, by the options that most layers take."""
        taps, gate = cls.default_conv_size, cls.gate_activation
        over, share = ", ".join(cls.convolved) or "q, k, v", "hidden_size / heads"
        key, value = ("" if n == 1 else f"{n:g} " for n in (cls.expand_k, cls.expand_v))
        values = share if cls.shares_values else "head_k_dim"
        return {
            "head_k_dim": f"head_k_dim = {cls.state_size or key + share}",
            "head_v_dim": f"head_v_dim = {value}{values}",
            "conv_size": f"a convolution of {taps} taps over {over}" if taps
            else "no convolution",
            "output_gate": f"an output gate ({gate})" if cls.default_output_gate
            else f"no output gate (with one: {gate})",
            "beta_max": f"beta_max = {cls.default_beta_max:g}",
            "n_steps": f"n_steps = {cls.default_n_steps}",
            "num_slots": f"num_slots = {cls.default_num_slots or 'head_k_dim'}",
            "feature_map": f"feature_map = {cls.default_feature_map}",
        }  # fmt: skip

    def __new__(cls, *given: Any, **options: Any) -> Self:
        check_given(cls, given, options)
        return super().__new__(cls)

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_v_heads: int | None = None,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int | None = None,
        conv_bias: bool | None = None,
        output_gate: bool | None = None,
        beta_max: float | None = None,
        n_steps: int | None = None,
        feature_map: str | None = None,
        qk_norm: QueryKeyNorm | None = None,
        output_norm: OutputNorm | None = None,
        normalizer: bool | None = None,
        longest_horizon: float | None = None,
        gate_lower_bound: float | None = None,
        num_slots: int | None = None,
        filter_size: int | None = None,
        mini_batch: int | None = None,
        spectrum: str | None = None,
        window: int | None = None,
        num_persistent: int | None = None,
        rope_theta: float | None = None,
        norm_eps: float = 1e-5,
        layer_index: int = 0,
        num_layers: int = 1,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in REASONS}
        super().__init__()
        self.hidden_size = checks.positive("hidden_size", hidden_size)
        self.num_heads = checks.positive("num_heads", num_heads)
        self.num_v_heads = checks.positive("num_v_heads", checks.default(num_v_heads, num_heads))
        checks.check_multiple("num_v_heads", self.num_v_heads, "num_heads", num_heads)
        head_k_dim = self.default_head_k_dim() if head_k_dim is None else head_k_dim
        self.head_k_dim = checks.positive("head_k_dim", head_k_dim)
        head_v_dim = self.default_head_v_dim() if head_v_dim is None else head_v_dim
        self.head_v_dim = checks.positive("head_v_dim", head_v_dim)
        self.beta_max = checks.default(checks.check_beta_max(beta_max), self.default_beta_max)
        self.n_steps = checks.positive("n_steps", checks.default(n_steps, self.default_n_steps))
        self.longest_horizon = horizon = checks.of_python(longest_horizon)
        fits = horizon is None or (checks.is_number(horizon) and horizon > 8)
        check_that(fits, "longest_horizon must be None or a number above 8", horizon)
        self.gate_lower_bound = checks.check_lower_bound(gate_lower_bound)
        slots = checks.default(self.default_num_slots, self.head_k_dim)
        self.num_slots = checks.positive("num_slots", checks.default(num_slots, slots))
        self.mini_batch = checks.positive("mini_batch", checks.default(mini_batch, 16))
        self.window, self.num_persistent, self.filter_size = window, num_persistent, filter_size
        self.spectrum = checks.default(spectrum, SPECTRA[0])
        self.rope_theta = checks.above_zero("rope_theta", checks.default(rope_theta, 10000.0))
        self.norm_eps = checks.above_zero("norm_eps", norm_eps)
        self.num_layers = checks.positive("num_layers", num_layers)
        self.layer_index = layer_index = checks.of_python(layer_index)
        fits = type(layer_index) is int and 0 <= layer_index < num_layers
        said = f"layer_index must be an integer from 0 to num_layers - 1 = {num_layers - 1}"
        check_that(fits, said, layer_index)
        taps = checks.default(conv_size, self.default_conv_size)
        self.conv_size = checks.check_integer("conv_size", taps, 0)
        self.conv_bias = checks.default(conv_bias, False)
        self.feature_map = checks.default(feature_map, self.default_feature_map)
        divides = isinstance(self.rule, Rule) and self.rule.normalizer
        self.qk_norm, self.normalizer = qk_norm, checks.default(normalizer, divides)
        self.output_norm: OutputNorm = checks.default(output_norm, "head")
        self.norm_of_all = self.norm_of_all or output_norm == "all"
        neutral = {"conv_size": 0, "n_steps": 1, "output_norm": "head", "normalizer": divides}
        neutral |= {"num_v_heads": num_heads, "head_k_dim": 1, "head_v_dim": self.head_k_dim}
        checks.check_meant(self.rule.name, self.takes, given, neutral)
        words = {"qk_norm": qk_norm, "output_norm": output_norm, "spectrum": spectrum}
        checks.check_words({"feature_map": self.feature_map, **words})
        flags = {"normalizer": normalizer, "output_gate": output_gate, "conv_bias": conv_bias}
        checks.check_flags(flags)
        said = "conv_bias must be None or False without a convolution"
        check_that(bool(self.conv_size) or not self.conv_bias, said, self.conv_bias)
        for name in self.even:
            checks.check_even(name, getattr(self, name))
        self.check_options()
        self.build_projections()
        self.build_gates()
        self.build_output(checks.default(output_gate, self.default_output_gate))

    @classmethod
    def from_config(cls, config: Any, layer_index: int) -> Self:
        """Build a model's layer layer_index, from 0; options that mean nothing are left out.

        `config` is a `deltarule.models.ModelConfig`, or whatever has its fields.
        """
        taken = filter(cls.takes, inspect.signature(cls.__init__).parameters)
        given = {n: getattr(config, n) for n in taken if hasattr(config, n)} | cls.heads(config)
        if cls.takes("layer_index"):
            given["layer_index"] = layer_index
        if cls.takes("norm_eps") and (eps := getattr(config, "output_norm_eps", None)) is not None:
            given["norm_eps"] = eps
        if not checks.default(given.get("conv_size"), cls.default_conv_size):
            given.pop("conv_bias", None)
        layer = cls(config.hidden_size, **given)
        # A block may have parts side by side, named by their names joined by +.
        names = [parts.split("+") for parts in config.layer_types]
        own = cls.rule.name
        layer.find_place([own if own in parts else parts[0] for parts in names], layer_index)
        layer.adopt(config)
        return layer

    def adopt(self, config: Any) -> None:
        """Follow what a model's configuration says beyond the options of a layer; here nothing."""

    @classmethod
    def heads(cls, config: Any) -> dict[str, int | None]:
        return {"num_heads": config.num_heads}

    @classmethod
    def takes(cls, option: str) -> bool:
        return option in cls.options

    def find_place(self, layer_types: Sequence[str], layer_index: int) -> None:
        """Learn which layers of a model are of the same kind; for most it does not matter."""

    @property
    def depth(self) -> float:
        """Position of the layer in its model, from 0 (first) to 1 (last)."""
        return self.layer_index / max(self.num_layers - 1, 1)

    def default_head_k_dim(self) -> int:
        """Channels of a key where none are given: expand_k * hidden_size / num_heads."""
        if self.state_size is not None:
            return self.state_size
        return self.share("head_k_dim", self.expand_k, "num_heads")

    def default_head_v_dim(self) -> int:
        """Channels of a value where none are given: expand_v * head_k_dim, or a share likewise."""
        if not self.shares_values:
            return self.expand_v * self.head_k_dim
        heads = "num_v_heads" if self.takes("num_v_heads") else "num_heads"
        return self.share("head_v_dim", self.expand_v, heads)

    def share(self, name: str, factor: float, heads: str) -> int:
        """factor * hidden_size / heads, the size of a head, if the heads can share so evenly."""
        channels, parts = factor * self.hidden_size, getattr(self, heads)
        if channels % parts:
            size = "hidden_size" if factor == 1 else f"{factor:g} * hidden_size"
            raise ValueError(
                f"{size} must be a multiple of {heads}={parts}, got {channels:g}: "
                f"change one of them, or give {name}"
            )
        return int(channels) // parts

    def check_options(self) -> None:
        """Refuse sizes that every layer has but that this one cannot follow; here none."""

    def memories(self) -> dict[str, tuple[int, ...]]:
        return {"recurrent": (self.num_v_heads, self.head_v_dim, self.head_k_dim)}

    def stream_sizes(self) -> dict[str, int]:
        """Channels of what x is projected to, over all heads."""
        keys = self.num_heads * self.head_k_dim
        return {"q": keys, "k": keys, "v": self.num_v_heads * self.head_v_dim}

    def activates(self, name: str) -> bool:
        """Whether SiLU follows the convolution of a stream."""
        return True

    def build_projections(self) -> None:
        sizes = self.stream_sizes()
        for name, size in sizes.items():
            self.build_projection(name, size)
        for name in self.convolved:
            self.build_convolution(name, sizes[name])

    def build_projection(self, name: str, size: int) -> None:
        self.add_module(f"{name}_proj", nn.Linear(self.hidden_size, size, name in self.biased))

    def build_convolution(self, name: str, size: int) -> None:
        if self.conv_size:
            given = self.conv_size, self.activates(name), self.conv_bias
            self.add_module(f"{name}_conv", ShortConv(size, *given))

    def build_gates(self) -> None:
        """Make what the decays, the write strengths and the like come from; here nothing."""

    def build_norm(self) -> nn.Module:
        heads, size, activation = self.num_v_heads, self.head_v_dim, self.gate_activation
        divided = self.normalizer and not self.centred
        if self.normless or divided or self.output_norm == "none":
            return GateOnly(activation)
        if self.centred:
            return GatedGroupNorm(heads, size, self.fixed_eps or self.norm_eps, activation)
        return GatedRMSNorm(size * heads if self.norm_of_all else size, self.norm_eps, activation)

    def build_output(self, gated: bool) -> None:
        self.o_norm = self.build_norm()
        self.g_proj = self.output_gate_projection() if gated else None
        self.o_proj = nn.Linear(self.num_v_heads * self.head_v_dim, self.hidden_size, bias=False)

    def output_gate_projection(self) -> nn.Module:
        return nn.Linear(self.hidden_size, self.num_v_heads * self.head_v_dim, bias=False)


# What the docstring says of each name; nothing where Python has dropped it.
DESCRIBED = dict(re.findall(r"^(?= {4}(\w+):)(.*(?:\n {5}.*)*)", inspect.getdoc(Mixer) or "", re.M))
