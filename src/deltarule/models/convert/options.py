"""What a config.json says, and which option here says the same: tables that go both ways.

Each option of a config.json is taken once, and none is passed over. An entry of a table reads and
writes; the factories below make one for each usual kind.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deltarule.models.config import THEIRS, ModelConfig
from deltarule.models.config_checks import SIZES, unused
from deltarule.models.convert.names import Tensors
from deltarule.nearest import check_known
from deltarule.nn.checks import check_integer, check_that, is_number

# What transformers and training code write for themselves, and how parameters were drawn: nothing
# that changes what a model computes by more than rounding.
_SILENT = frozenset({
    *THEIRS, "A_init_range", "attention_dropout", "_attn_implementation", "attn_mode", "auto_map",
    "autocast_kernel_dtype", "chunk_size", "chunkwise_kernel", "conv_init", "dt_init_floor",
    "dt_max", "dt_min", "elementwise_affine", "fuse_cross_entropy", "fuse_linear_cross_entropy",
    "fuse_norm", "fuse_swiglu", "fused_add_norm", "hidden_dropout", "inference_state_dtype",
    "initializer_range", "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor",
    "linear_dt_max", "linear_dt_min", "mamba_chunk_size", "mamba_dt_init_floor", "mamba_dt_max",
    "mamba_dt_min", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "max_inference_chunksize",
    "max_position_embeddings", "model_type", "_name_or_path", "norm_reduction_force_float32",
    "num_logits_to_keep", "output_router_logits", "pad_vocab_size_multiple",
    "rescale_prenorm_residual", "residual_in_fp32", "return_last_states", "router_aux_loss_coef",
    "router_jitter_noise", "sequence_kernel", "step_kernel", "time_step_floor",
    "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale",
    "use_associative_scan", "use_falcon_mambapy", "use_l2warp", "use_mamba_kernels", "use_mambapy",
    "z_loss_coefficient",
})  # fmt: skip


class Fields:
    """Options of a config.json by name, taken one after another."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self.left = {name: value for name, value in stored.items() if name not in _SILENT}

    def take(self, name: str, default: Any = None) -> Any:
        """Return an option of any type; None and an absent one are the default."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def has(self, name: str) -> bool:
        return self.left.get(name) is not None

    def integer(self, name: str, default: int | None = None, smallest: int = 0) -> int:
        """Return an integer; without a default it is required."""
        value = self._required(name, default)
        check_integer(name, value, smallest)
        return value

    def factor(self, name: str) -> float:
        """Return a number above 0; absent, it is 1."""
        value = self.number(name, 1.0)
        check_that(value > 0, f"{name} must be above 0", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; without a default it is required."""
        value = self._required(name, default)
        check_that(is_number(value), f"{name} must be a finite number", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        check_that(isinstance(value, bool), f"{name} must be true or false", value)
        return value

    def inside(self, name: str) -> "Fields":
        value = self.take(name, {})
        check_that(isinstance(value, dict), f"{name} must be an object", value)
        return Fields(value)

    def listed(self, name: str, default: list[Any]) -> list[Any]:
        """Return a list of integers, numbers or words; one of the length of the default, if any."""
        value = self.take(name, default)
        fits = isinstance(value, list) and (not default or len(value) == len(default))
        size = f" of {len(default)}" if default else ""
        check_that(fits, f"{name} must be a list{size}", value)
        return value

    def only(self, name: str, *known: object) -> None:
        """Take an option of which only some values can be said here; absent, it is the first."""
        value = self.left.pop(name, known[0])
        said = f"{name} must be {' or '.join(map(repr, known))}"
        check_that(value in known, said, value, "CausalLM has no option for it")

    def drop(self, *names: str) -> None:
        for name in names:
            self.left.pop(name, None)

    def done(self) -> None:
        if self.left:
            names = ", ".join(map(repr, sorted(self.left)))
            raise ValueError(f"unknown option {names}, which may change the model")

    def _required(self, name: str, default: object) -> Any:
        value = self.take(name, default)
        if value is None:
            raise ValueError(f"missing key {name!r}")
        return value


# Options of `ModelConfig`, or of a config.json.
Options = dict[str, Any]
Value = Callable[[ModelConfig], Any]
# Beside a value: one that follows from the options here that are found before it.
Follows = Callable[[Options], Any]


@dataclass(frozen=True)
class Entry:
    """Options that say the same in config.json and here.

    `read` makes further options, if any, of config.json and of those that the entries before have
    found; `write` goes back from a configuration with every option written out.
    """

    read: Callable[[Fields, Options], Options | None]
    write: Callable[[ModelConfig], Options] = lambda config: {}


Table = tuple[Entry, ...]


def read(table: Iterable[Entry], fields: Fields) -> Options:
    found: Options = {}
    for entry in table:
        found |= entry.read(fields, found) or {}
    return found


def write(table: Iterable[Entry], config: ModelConfig) -> Options:
    """The options of config.json that have a value, and THEIRS; a later entry overrules."""
    given = {name: value for entry in table for name, value in entry.write(config).items()}
    return {name: value for name, value in given.items() if value is not None or name in THEIRS}


def option(
    theirs: str,
    ours: str,
    take: Callable[[Fields, str, Any], Any],
    default: Any = None,
    value: Value | None = None,
) -> Entry:
    """One option there and one here; `value` is what is written, where it is not that one here."""

    def found(fields: Fields, before: Options) -> Options:
        return {ours: take(fields, theirs, default(before) if callable(default) else default)}

    return Entry(found, lambda c: {theirs: getattr(c, ours) if value is None else value(c)})


def integer(
    theirs: str,
    ours: str | None = None,
    default: int | Follows | None = None,
    *,
    smallest: int = 0,
    value: Value | None = None,
) -> Entry:
    """An integer, by the same name if only one is given; without a default it is required."""
    take = partial(Fields.integer, smallest=smallest)
    return option(theirs, ours or theirs, take, default, value)


def number(theirs: str, ours: str, default: float | None = None) -> Entry:
    """A number; without a default it is required."""
    return option(theirs, ours, Fields.number, default)


def factor(name: str) -> Entry:
    return option(name, name, lambda fields, name, _: fields.factor(name))


def flag(theirs: str, ours: str, default: bool) -> Entry:
    return option(theirs, ours, Fields.flag, default)


def word(theirs: str, words: Mapping[str, Any], default: str, ours: str | None = None) -> Entry:
    """One of their words, by which ours go."""

    def take(fields: Fields, theirs: str, default: str) -> Any:
        check_known(theirs, given := fields.take(theirs, default), words)
        return words[given]

    back = {own: given for given, own in words.items()}
    name = ours or theirs
    return option(theirs, name, take, default, lambda config: back.get(getattr(config, name)))


def only(values: Mapping[str, object]) -> Entry:
    """Options of which only some values can be said here: one, or those of a tuple."""

    def take(fields: Fields, before: Options) -> None:
        for name, known in values.items():
            fields.only(name, *(known if isinstance(known, tuple) else (known,)))

    return Entry(take)


def silent(*names: str) -> Entry:
    return Entry(lambda fields, before: fields.drop(*names))


def older(names: Mapping[str, str]) -> Entry:
    """Older names of options that follow, by which the newer ones go."""

    def take(fields: Fields, before: Options) -> None:
        for old, new in names.items():
            if old in fields.left:
                fields.left.setdefault(new, fields.left.pop(old))

    return Entry(take)


def fixed(here: Options | None = None, there: Options | None = None) -> Entry:
    """What every model of a family has, in words of one side alone."""
    return Entry(lambda fields, before: here or {}, lambda config: there or {})


def where(test: Callable[[Options], bool], table: Table, *, always: bool = False) -> Entry:
    """A table that counts only where the options here say so; `always`: it is written anyway."""
    return Entry(
        lambda fields, before: own if (own := read(table, fields)) and test(before) else {},
        lambda config: write(table, config) if always or test(vars(config)) else {},
    )


def sizes(
    vocab_size: int | None = None,
    hidden_size: int | None = None,
    num_layers: int | Follows | None = None,
) -> Table:
    return (
        integer("vocab_size", default=vocab_size),
        integer("hidden_size", default=hidden_size, smallest=1),
        integer("num_hidden_layers", "num_layers", num_layers),
        # Unless they are known, no token is special.
        fixed(there={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
    )


def tied(otherwise: bool) -> Entry:
    return flag("tie_word_embeddings", "tie_embeddings", otherwise)


def negative(theirs: str, otherwise: bool) -> Entry:
    """Write strengths up to 2 if they say so, and else up to 1."""
    return Entry(
        lambda fields, before: {"beta_max": 2.0 if fields.flag(theirs, otherwise) else 1.0},
        lambda config: {theirs: config.beta_max == 2},
    )


@dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json and the tensors of a family are called, and what they are here.

    Args:
        model_type: In config.json.
        architecture: The class that reads it elsewhere, for config.json.
        options: What config.json says, entry by entry.
        tensors: What the tensors are called.
        aliases: Further values of model_type that are read.
        ignored: How names of tensors begin that belong to no language model.
        derived: How names of tensors end that follow from config.json; none is written.
        unwritten: Options that are read, and that what reads them elsewhere does not want.
        check: Refuses, with a ValueError, configurations that the options alone cannot say.
    """

    model_type: str
    architecture: str
    options: Table
    tensors: Tensors
    aliases: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    check: Callable[[ModelConfig], None] = lambda config: None

    def config(self, stored: Mapping[str, Any]) -> ModelConfig:
        fields = Fields(stored)
        # A file says sizes of layers of the family that this model may have none of.
        given = read(self.options, fields)
        for name in unused(ModelConfig, given, *SIZES):
            del given[name]
        config = ModelConfig(**given)
        fields.done()
        return config

    def fields(self, config: ModelConfig) -> dict[str, Any]:
        """Return what config.json holds for a configuration with every option written out."""
        head = {"model_type": self.model_type, "architectures": [self.architecture]}
        said = head | write(self.options, config)
        self.check(config)
        return {name: value for name, value in said.items() if name not in self.unwritten}
