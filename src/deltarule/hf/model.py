"""`CausalLM` under transformers' interface: generate, Trainer, PEFT, Auto classes."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltarule.hf.cache import StateCache
from deltarule.hf.configuration import DeltaruleConfig
from deltarule.hf.hooks import AFRESH, CACHE, cache_of, find_documents, one_row
from deltarule.models import CausalLM, CheckpointError
from deltarule.models.config import MODEL_TYPE
from deltarule.nn import MIXERS


class DeltaruleForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A `CausalLM` that transformers can generate with, train, adapt, evaluate, save and load.

    Args:
        config: Sizes and layers.

    Attributes:
        model: The `CausalLM`, whose parameters these are.

    Raises:
        ValueError: The configuration describes no model.

    Examples:
        >>> config = DeltaruleConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2,
        ...                          num_heads=2, mixers="gated_deltanet")
        >>> model = DeltaruleForCausalLM(config)
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    config_class = DeltaruleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    accepts_loss_kwargs = True
    # The embedding is the head: there is one parameter, not two that are tied.
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012
    # Gates lose their slow decays in 16 bits.
    _keep_in_fp32_modules_strict = sorted(
        {name for mixer in MIXERS.values() for name in mixer.float32_parameters}
    )
    # The cache has a way back.
    _is_stateful = False

    def __init__(self, config: DeltaruleConfig) -> None:
        super().__init__(config)
        self.model = CausalLM(config.to_model_config())
        self._drawn = not self.model.embedding.weight.is_meta
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: StateCache | None = None,
        tokenizer: Any = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Predict every next token.

        Args:
            input_ids: Integers [B, T].
            attention_mask: [B, T], or [B, S + T] after S tokens in the cache; 0 at padding, on
                either side. None: no padding.
            position_ids: [B, T]; where they start again a packed document begins, without a mask
                and without a cache. They mean nothing else.
            past_key_values: What an earlier call returned, to be continued in place.
            inputs_embeds: Refused.
            labels: [B, T], -100 where nothing is predicted; the loss shifts them by one.
            use_cache: Whether to return a cache. None: not in training.
            logits_to_keep: Positions from the end that have logits, or their indices. 0: all.
            cu_seq_lens_q: Offsets [N + 1] of packed documents.
            cu_seq_lens_k: The same, as collators give it; not read.
            max_length_q: As collators give it; not read.
            max_length_k: As collators give it; not read.
            seq_idx: [B, T] the number of each token's document.
            num_items_in_batch: Labels over which the loss is averaged. None: those given here.
            output_attentions: Refused if True.
            output_hidden_states: Refused if True.
            return_dict: False gives a tuple.
            cache: What transformers calls `past_key_values` since 5.24.
            tokenizer: As `generate` hands it on, which reads `stop_strings` with it; not read.

        Returns:
            Loss (with labels), logits, and the cache.

        Raises:
            ValueError: An argument is refused or does not fit.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("inputs_embeds is not supported: give input_ids")
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions and output_hidden_states must be False or None")
        cache = past_key_values if cache is None else cache
        documents = find_documents({
            "input_ids": input_ids, "attention_mask": attention_mask, "seq_idx": seq_idx,
            "position_ids": position_ids, "cache": cache, "cu_seq_lens_q": cu_seq_lens_q,
        })  # fmt: skip
        if documents is None:
            use_cache = not self.training if use_cache is None else use_cache
            cache = StateCache() if cache is None and use_cache else cache
            mask = real_tokens(attention_mask, input_ids)
            state = None if cache is None else cache.state
            x, state = self.model.hidden(input_ids, state, mask=mask)
            if cache is not None:
                cache.advance(self.model, input_ids, mask, state)
        else:
            if cache is not None and cache.state is not None:
                raise ValueError(AFRESH)
            x, _ = self.model.hidden(one_row(input_ids), cu_seqlens=documents)
            x, cache = x.view(*input_ids.shape, -1), None
        kept = logits_to_keep
        logits = self.model.logits(x[:, kept if isinstance(kept, Tensor) else slice(-kept, None)])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )  # fmt: skip
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return out.to_tuple() if return_dict is False else out

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the head; None where it is the embedding."""
        return self.model.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head."""
        self.model.head = value

    def _init_weights(self, module: nn.Module) -> None:
        """Draw nothing: the layers have, unless the model was made to be filled from a file."""
        own = module.named_parameters(recurse=False)
        missing = [name for name, x in own if not getattr(x, "_is_hf_initialized", False)]
        if missing and not self._drawn:
            raise CheckpointError(f"tensor {missing[0]!r} of a {type(module).__name__} is missing")

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """The model checkpoints its own blocks, all of them."""
        self.model.activation_checkpointing = self.gradient_checkpointing = enable

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        if (given := cache_of(model_kwargs)) is not None:
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            cache = model_kwargs[CACHE] = StateCache()
            if generation_config.is_assistant:
                cache.activate_past_recording()


def real_tokens(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """[B, T] bool, True at real tokens, of those that are read now; None where all are real."""
    if attention_mask is None or tokens.shape[1] == 1:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be [B, T], got {list(attention_mask.shape)}")
    real = attention_mask[:, -tokens.shape[1] :].bool()
    return None if bool(real.all()) else real


def wrap(
    model: CausalLM,
    *,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> DeltaruleForCausalLM:
    """Put a model under transformers' interface; the parameters are the same, not copies.

    Args:
        model: On any device, in any dtype.
        pad_token_id: Of the tokenizer; None: it has none. Where prompts are padded, `generate`
            fills up finished rows with it.
        bos_token_id: The token that begins a text.
        eos_token_id: The token that ends a text, and generation.

    Returns:
        The model for transformers, in the same mode (training or not).

    Examples:
        >>> from deltarule.models import ModelConfig
        >>> own = CausalLM(ModelConfig(vocab_size=257, hidden_size=32, num_layers=1, num_heads=2,
        ...                            layer_types="kda"))
        >>> wrap(own, eos_token_id=256).model is own
        True
    """
    if not isinstance(model, CausalLM):
        raise ValueError(f"model must be a CausalLM, got {type(model).__name__}")
    config = DeltaruleConfig.from_model_config(
        model.config, pad_token_id=pad_token_id, bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        wrapped = DeltaruleForCausalLM(config)
    wrapped.model = model
    wrapped.train(model.training)
    return wrapped


AutoConfig.register(MODEL_TYPE, DeltaruleConfig, exist_ok=True)
AutoModelForCausalLM.register(DeltaruleConfig, DeltaruleForCausalLM, exist_ok=True)
