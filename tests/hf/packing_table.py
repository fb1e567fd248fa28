"""Print the table of `docs/transformers/patch.md`: how far packed documents are from single ones.

PYTHONPATH=tests python tests/hf/packing_table.py
"""

import math

from transformers.utils import logging

from deltarule.hf import patch
from hf.families import FAMILIES, FORMS, alone, collated, error, logits, tiny, tokens

LENGTHS = (13, 1, 40, 16)


def packed_error(model, documents, form) -> float:
    """Relative RMS of the logits of the collator's row against the documents alone."""
    batch = collated(documents, form)
    batch.pop("labels")
    try:
        return error(logits(model, batch.pop("input_ids"), **batch), alone(model, documents))
    except ValueError:
        return math.inf


def main() -> None:
    """One row a family: transformers alone in each form, then the patched model's worst."""
    logging.set_verbosity_error()
    print(f"| family | {' | '.join(f'`{form}`' for form in FORMS)} | patched, worst |")
    print("|---|---|---|---|---|")
    for name in FAMILIES:
        model = tiny(name)
        documents = [tokens(length) for length in LENGTHS]
        cells = [packed_error(model, documents, form) for form in FORMS]
        with patch(model):
            ours = [packed_error(model, documents, form) for form in FORMS]
        print(f"| {name} | {' | '.join(map(written, cells))} | {written(max(ours))} |")


def written(value: float) -> str:
    """A percentage where it is one; "refused" where there is no value."""
    if value == math.inf:
        return "refused"
    return f"{value:.1e}" if value < 1e-3 else f"{100 * value:.0f} %"


if __name__ == "__main__":
    main()
