"""What a recipe is: the sizes of one published model, how it was trained, and what is not known."""

from dataclasses import dataclass

from deltarule.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the authors say they trained it; AdamW and a cosine schedule everywhere.

    Args:
        tokens: Tokens in all.
        batch_tokens: Tokens in a step.
        context: Tokens in a sequence.
        learning_rate: The highest.
        final_learning_rate: Where the cosine ends.
        first_learning_rate: Where the warm-up starts.
        warmup_tokens: Tokens until the highest learning rate.
        weight_decay: Of AdamW.
        clip: Largest norm of the gradient.
        data: What it was trained on, and with which tokenizer.
    """

    tokens: float
    batch_tokens: float
    context: int
    learning_rate: float
    final_learning_rate: float
    warmup_tokens: float
    weight_decay: float
    clip: float
    data: str
    first_learning_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model of one paper.

    Args:
        name: Key in `RECIPES`.
        title: What its authors call it.
        model: Its sizes, for `CausalLM`.
        training: How it was trained. None: unknown, or a model that we made up.
        parameters: How many its authors say it has. None: they do not say, or what they say does
            not agree with its sizes; see `unknown`.
        head_counted: Whether their number counts the output head beside the embedding.
        source: Where the sizes are from.
        unknown: What the source leaves open, and what is ours. "": nothing.
    """

    name: str
    title: str
    model: ModelConfig
    source: str
    training: Training | None = None
    parameters: float | None = None
    head_counted: bool = True
    unknown: str = ""
