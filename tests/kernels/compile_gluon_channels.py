"""Compile the fused forward with a decay per channel for a GPU that need not be here.

A program of its own, as compile_gluon.py is.
"""

import json
import sys
from itertools import product

import torch
from ahead import compiled, recording
from compile_gluon import Form, forward, inputs_of

from deltarule.ops.delta_rule.gluon import stage
from deltarule.ops.delta_rule.inputs import Inputs

TARGET = 90
# A rule's name, and that of the rule without decays that has its erase.
RULES = {"kda": "delta", "gla": "plain"}
FORMS = list(product(RULES, ("bare", "unit"), ("whole", "ragged", "packed")))


def with_decays(rule: str, norm: str, tokens: str) -> Inputs:
    """Tensors that nobody fills."""
    inputs = inputs_of(Form(RULES[rule], 128, norm, "alone", tokens))
    q, v = inputs.q, inputs.v
    return inputs._replace(log_decay=torch.empty(*q.shape[:2], *v.shape[2:3], q.shape[3]))


def main(names: list[str]) -> None:
    """Print one JSON object a line for each form, or for those that are named: "kda bare whole"."""
    for form in FORMS:
        name, inputs = " ".join(form), with_decays(*form)
        if names and name not in names:
            continue
        assert stage.why_not_form(inputs) is None
        with recording() as launches:
            forward(inputs)
        report = compiled(launches[-1], TARGET)._asdict()
        print(json.dumps({"call": name, **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
