"""The layers of linear rules: projections, mapped by the rule, run by `delta_rule` or `dplr`.

    project -> short convolution -> rule -> operator -> read-out, norm, output gate -> project

A layer on top of it says which rule it follows, which gates feed the rule, and its defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltarule import ops
from deltarule.nn import one_token
from deltarule.nn.checks import COMMON, check_features
from deltarule.nn.convolved_products import convolve_products
from deltarule.nn.feature_maps import QueryKeyMap
from deltarule.nn.few_rows import as_one, kernel_rows
from deltarule.nn.gates import float32_parameter, initial_A_log, initial_dt_bias, spread_A_log
from deltarule.nn.layout import Layout, make_layout, per_step, silence_padding, split
from deltarule.nn.linears import linear, linears, plain_weights
from deltarule.nn.mixer import Mixer
from deltarule.nn.norm import gated_norm_product
from deltarule.nn.recomputed import recomputed
from deltarule.nn.rule import CONVOLUTIONS, Arguments, LayerCall, Projections, Rule, as_it_is
from deltarule.nn.short_conv import at_once, can_step, convolved, step_in_place, within_product
from deltarule.nn.state import DraftedState, FirstState, LentState, State
from deltarule.ops.delta_rule.step import next_step
from deltarule.ops.few_tokens import decodes
from deltarule.shapes import Hidden, RecurrentOutput

OPERATORS: dict[str, Callable[..., RecurrentOutput]] = {
    "delta_rule": ops.delta_rule,
    "dplr": ops.dplr,
}


class DeltaMixer(Mixer):
    """A layer whose state is a matrix for each head, kept by a linear rule."""

    rule: ClassVar[Rule]
    options = COMMON | {"num_v_heads"}
    # Whether feature_map and qk_norm are options.
    maps_features: ClassVar[bool] = False
    # Whether each value head has a gate, whose logits are a_proj x.
    gates_heads: ClassVar[bool] = False
    # Whether a free erase has a strength that beta_max bounds.
    frees_strength: ClassVar[bool] = False
    # Whether the decay is exp(-exp(A_log) dt), so that longest_horizon means something.
    has_rates: ClassVar[bool] = False
    # SiLU on q, k and v where no convolution brings its own.
    activates_projections: ClassVar[bool] = False
    # Whether the rule reads its layer's depth; compiled code is then of one layer alone.
    reads_depth: ClassVar[bool] = False
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")
    # What projections of x are multiplied by, by their letters.
    multipliers: Mapping[str, float] = MappingProxyType({})

    qk_map: QueryKeyMap | None
    a_proj: nn.Module | None
    b_proj: nn.Module | None

    @classmethod
    def takes(cls, option: str) -> bool:
        # With an erase, the sum of the keys is not what the state holds: it divides nothing.
        divides = cls.maps_features and cls.rule.erase == "none" and not cls.rule.normalizer
        by_rule = {
            "beta_max": cls.rule.erase == "tied" or cls.frees_strength,
            "longest_horizon": cls.has_rates,
            "n_steps": cls.default_n_steps > 1,
            "feature_map": cls.maps_features,
            "qk_norm": cls.maps_features,
            "output_norm": cls.maps_features and cls.rule.erase != "none",
            "normalizer": divides,
        }
        return by_rule.get(option, option in cls.options)

    @classmethod
    def heads(cls, config: Any) -> dict[str, int | None]:
        return {"num_heads": config.num_heads, "num_v_heads": config.num_v_heads}

    def heads_of(self, name: str) -> int:
        return self.num_heads if name in ("q", "k") else self.num_v_heads

    def activates(self, name: str) -> bool:
        """SiLU follows the convolution of q and k only where no feature map does."""
        return name == "v" or self.feature_map is None

    def stream_sizes(self) -> dict[str, int]:
        """Channels of q, k and v, n_steps times as many where each step has its own."""
        sizes = {"q": self.head_k_dim, "k": self.head_k_dim, "v": self.head_v_dim}
        steps = {"q": 1, "k": self.n_steps, "v": self.n_steps}
        return {name: size * self.heads_of(name) * steps[name] for name, size in sizes.items()}

    def build_projections(self) -> None:
        self.qk_map = None
        if self.feature_map is not None:
            self.qk_map = QueryKeyMap(self.feature_map, self.num_heads, self.head_k_dim)
            self.counts = self.qk_map.map.positional
        if self.maps_features:
            name, by_channel = self.feature_map or "identity", self.rule.decay == "channel"
            check_features(name, self.head_k_dim, self.normalizer, by_channel)
        for name, size in self.stream_sizes().items():
            self.build_projection(name, size)
            self.build_convolution(name, size)

    def build_gates(self) -> None:
        for name in ("A_log", "dt_bias", "D"):
            self.register_parameter(name, None)
        self.a_proj = self.b_proj = None
        if self.gates_heads:
            self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        if self.rule.erase == "tied":
            size = self.heads_of("beta") * self.n_steps
            self.b_proj = nn.Linear(self.hidden_size, size, bias=False)

    def build_head_decay(self, slowest: float) -> None:
        """Make a decay for each head, its rate drawn from U(slowest, 16)."""
        self.a_proj = nn.Linear(self.hidden_size, self.num_v_heads, bias=False)
        self.build_rates(initial_A_log(self.num_v_heads, slowest), self.num_v_heads)

    def build_rates(self, A_log: Tensor, *sizes: int) -> None:
        """Keep the paper's draw, or spread the heads' horizons up to the longest one."""
        dt_bias = initial_dt_bias(*sizes)
        if self.longest_horizon is not None:
            A_log = spread_A_log(dt_bias, self.longest_horizon)
        self.A_log = float32_parameter(A_log)
        self.dt_bias = float32_parameter(dt_bias)

    def memories(self) -> dict[str, tuple[int, ...]]:
        features = self.head_k_dim if self.qk_map is None else self.qk_map.features
        return {"recurrent": (self.num_v_heads, self.head_v_dim + self.normalizer, features)}

    def mix(self, call: LayerCall) -> Tensor:
        call.decoding = self.decodes(call)
        projections = self.project(call)
        with recomputed(*call.convolved):
            o = self.run_operator(projections, call)
        if projections.output_gate is None and "g" in call.projected:
            projections = replace(projections, output_gate=self.by_head(call.projected["g"]))
        return self.finish(o, projections, call)

    def add_one_token(
        self, x: Hidden, norm: nn.Module, state: State | None
    ) -> tuple[Hidden, State] | None:
        """Return x + mixer(norm(x)) of one token by few kernels, or None."""
        own = all(
            getattr(type(self), name) is getattr(DeltaMixer, name)
            for name in ("forward", "mix", "project", "finish", "normed")
        )
        fits = one_token.fits_heads(self.num_v_heads, self.head_v_dim)
        if not own or not fits or self.norm_of_all:
            return None
        modules = self.of_input()
        if not one_token.fits(x, self, (norm, self.o_norm), (*modules.values(), self.o_proj)):
            return None
        layout = make_layout(x, None, None)
        call = LayerCall(x, layout, self.state_before(state, layout), State(), {})
        products = one_token.normed_products(x, norm, tuple(modules.values()))
        call.projected.update(zip(modules, products, strict=True))
        call.decoding = self.decodes(call)
        projections = self.project(call)
        o = self.run_operator(projections, call)
        o = self.rule.read_out_function(o, projections)
        gate = projections.output_gate
        return one_token.add_normed_product(x, o, gate, self.o_norm, self.o_proj), call.after

    def project(self, call: LayerCall) -> Projections:
        steps, projected, convolved = self.n_steps, call.projected, False
        if not projected:
            modules = self.of_input()
            if call.layout.context is not None:
                call.share(modules, max(self.conv_size - 1, 0), self.multipliers)
            elif call.x.requires_grad and self.conv_size and not self.multipliers:
                convolved = convolve_products(call, modules, self._modules)
            if call.decoding and not torch.compiler.is_compiling():
                self.convolve_within(call, modules)
            if not convolved:
                outputs = linears(call.x, tuple(modules.values()), call.within)
                projected.update(zip(modules, outputs, strict=True))
        for name, factor in self.multipliers.items():
            projected[name] = projected[name] * factor
        if call.last_rows is not None:
            call.ask_before(self.of_input(), self.multipliers)
        if isinstance(call.before, DraftedState):
            self.keep_short(call, call.before)
        if self.conv_size:
            if not convolved and call.within is None:
                self.convolve(call)
        elif self.activates_projections:
            projected.update({n: F.silu(projected[n]) for n in "qkv" if self.activates(n)})
        q = split(projected.pop("q"), self.heads_of("q"), self.head_k_dim)
        k = per_step(projected.pop("k"), steps, self.heads_of("k"), self.head_k_dim)
        if (qk_map := self.qk_map) is not None:
            q, k = qk_map(q, k, call.positions() if self.counts else None)
        v = per_step(projected.pop("v"), steps, self.heads_of("v"), self.head_v_dim)
        if not self.conv_size and call.x.is_cuda and call.x.requires_grad:
            # Columns of one product, which both passes of the operator would lay out.
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        by_channel = self.rule.decay == "channel"
        decay_sizes = (self.num_v_heads, self.head_k_dim)[: 1 + by_channel]
        return Projections(
            q=q,
            k=k,
            v=v,
            decay_logits=split(projected["a"], *decay_sizes) if "a" in projected else None,
            beta_logits=per_step(projected["b"], steps) if "b" in projected else None,
            output_gate=self.by_head(projected["g"]) if "g" in projected else None,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            gate_lower_bound=self.gate_lower_bound,
            D=self.D,
            beta_max=self.beta_max,
            n_steps=steps,
            depth=self.depth if self.reads_depth else 0.0,
            qk_norm=self.qk_norm,
            normalizer=self.normalizer,
            layout=call.layout,
            decoding=call.decoding,
        )

    def state_before(self, state: State | None, layout: Layout) -> State:
        """Of a fresh start, zeros alone, nothing is made that an operator does without."""
        if state is not None or torch.compiler.is_compiling():
            return super().state_before(state, layout)
        return FirstState(partial(self.init_state, layout.sequences))

    def decodes(self, call: LayerCall) -> bool:
        """Whether this is certainly a decoding step: no gradient, no padding, no context."""
        layout, states = call.layout, call.before.values()
        if torch.is_grad_enabled() or layout.real is not None or layout.context is not None:
            return False
        return decodes(call.x, layout.cu_seqlens, states)

    def keeps_tokens(self) -> bool:
        """Whether the state is the operator's, histories of convolutions and a number of tokens."""
        return type(self).project is DeltaMixer.project and self.rule.final_state is as_it_is

    def keep_short(self, call: LayerCall, drafted: DraftedState) -> None:
        tokens = call.x.shape[1]
        for name in "qkv" if self.conv_size else ():
            history, x = drafted[f"{name}_conv"], call.projected[name]
            rows = torch.cat([history.to(x.dtype), x], 1).unfold(1, history.shape[1], 1)
            drafted.kept[f"{name}_conv"] = rows[:, 1:].mT
        if "length" in drafted:
            ordinal = torch.arange(1, tokens + 1, device=call.x.device)
            drafted.kept["length"] = drafted["length"][:, None] + ordinal

    def convolve_within(self, call: LayerCall, modules: dict[str, nn.Module]) -> None:
        """In a step of a few rows, let the product that makes q, k and v convolve them."""
        alone = self.conv_size and call.x.shape[1] == 1 and not self.multipliers
        # First what rules out nearly every call.
        if not alone or type(call.before) is not LentState or kernel_rows(call.x) < 2:
            return
        weights = plain_weights(modules.values())
        whole = as_one(weights) if len(weights) == len(modules) else None
        if whole is None or kernel_rows(call.x, whole) < 2:
            return
        convolutions = [self._modules[key] for key in CONVOLUTIONS]
        histories = [call.before[key] for key in CONVOLUTIONS]
        if (within := within_product(convolutions, histories, call.x)) is not None:
            call.within = within
            call.after.update(zip(CONVOLUTIONS, histories, strict=True))

    def convolve(self, call: LayerCall) -> None:
        """Convolve q, k and v; a step overwrites their histories, where one kernel does all."""
        modules: list[Any] = [self._modules[key] for key in CONVOLUTIONS]
        # Taken out: without a gradient they are not needed after their convolution.
        streams = [call.projected.pop(name) for name in "qkv"]
        histories: list[Any] = [call.before.get(key) for key in CONVOLUTIONS]
        lent = call.decoding and isinstance(call.before, LentState)
        if lent and can_step(modules, streams, histories):
            found, after = step_in_place(modules, streams, histories), histories
        else:
            given = modules, streams, histories, call.layout
            one = at_once(*given) if call.decoding and call.x.shape[1] == 1 else None
            found, after = convolved(*given) if one is None else one
        call.keep_convolved(modules, streams, histories, found, after)

    def of_input(self) -> dict[str, nn.Module]:
        # From the table: a Python function answers each `self.q_proj`.
        modules = {name: self._modules.get(f"{name}_proj") for name in "qkvabg"}
        return {name: module for name, module in modules.items() if module is not None}

    def run_operator(self, projections: Projections, call: LayerCall) -> Tensor:
        """Map the projections by the rule, silence padding, run the operator, keep its state."""
        arguments = self.rule.arguments(projections)
        arguments = silence_padding(arguments, call.layout.real, n_steps=self.n_steps)
        before = call.before.get("recurrent")
        layout, others = call.layout, (*arguments.values(), before)
        if call.decoding or (layout.context is None and decodes(call.x, layout.cu_seqlens, others)):
            o, state = self.step(arguments, call)
        else:
            o, final_state = OPERATORS[self.rule.operator](
                **arguments, **layout.spans, initial_state=before, save_states=self.save_states
            )
            assert final_state is not None
            state = final_state
        call.after["recurrent"] = self.rule.final_state(state, projections)
        return o

    def step(self, arguments: Arguments, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Carry the state token by token: a copy of the one before, unless that is lent."""
        before = call.before["recurrent"]
        if not isinstance(call.before, LentState):
            state = before.clone()
            return ops.recurrent_step(**{"beta": None, **arguments, "state": state}), state
        kept = None
        if isinstance(call.before, DraftedState):
            kept = before.new_empty(len(before), call.x.shape[1], *before.shape[1:])
            call.before.kept["recurrent"] = kept
        # The layer's own, from the call before, which was like this one.
        return next_step(arguments, before, kept), before

    def finish(self, o: Tensor, projections: Projections, call: LayerCall) -> Tensor:
        o = self.rule.read_out_function(o, projections)
        # The gate alone: what computes the norm again must not hold the other projections.
        gate = projections.output_gate
        y = gated_norm_product(self.o_norm, o, gate, self.o_proj, call.gate_slot)
        if y is not None:
            return y
        normed = self.normed(o, gate)
        with recomputed((normed, lambda: self.normed(o, gate))):
            return linear(normed, self.o_proj)
