"""Print the table of `docs/transformers/patch.md`: how far packed documents are from single ones.

PYTHONPATH=tests python tests/hf/packing_table.py
"""

import math

import torch
from transformers import DataCollatorWithFlattening
from transformers.utils import logging

from deltarule.hf import patch
from hf.families import FAMILIES, error, tiny, tokens

LENGTHS = (13, 1, 40, 16)
FORMS = {
    "`position_ids`": {},
    "`cu_seq_lens_q`": {"return_flash_attn_kwargs": True},
    "`seq_idx`": {"return_seq_idx": True},
}


def packed_error(model, documents, options) -> float:
    """Relative RMS of the logits of the collator's row against the documents alone."""
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(
        [{"input_ids": document.tolist()} for document in documents]
    )
    batch.pop("labels")
    with torch.no_grad():
        alone = torch.cat([model(d[None], use_cache=False).logits for d in documents], 1)
        try:
            return error(model(**batch, use_cache=False).logits, alone)
        except ValueError:
            return math.inf


def main() -> None:
    """One row a family: transformers alone in each form, then the patched model's worst."""
    logging.set_verbosity_error()
    print(f"| family | {' | '.join(FORMS)} | patched, worst |")
    print("|---|---|---|---|---|")
    for name in FAMILIES:
        model = tiny(name)
        documents = [tokens(length) for length in LENGTHS]
        cells = [packed_error(model, documents, options) for options in FORMS.values()]
        with patch(model):
            ours = [packed_error(model, documents, options) for options in FORMS.values()]
        print(f"| {name} | {' | '.join(map(written, cells))} | {written(max(ours))} |")


def written(value: float) -> str:
    """A percentage where it is one; "refused" where there is no value."""
    if value == math.inf:
        return "refused"
    return f"{value:.1e}" if value < 1e-3 else f"{100 * value:.0f} %"


if __name__ == "__main__":
    main()
