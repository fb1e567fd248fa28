"""Which tests `pytest` leaves to CI: those whose price is minutes, by what they spend them on.

The default run keeps every property once; a part has its many cases. CI runs all parts.
"""

import re

import pytest

# By marker: a pattern of `file::test` under tests/. The first that fits counts.
PARTS = {
    "ahead": r"kernels/test_ahead\.py",
    "processes": r"test_processes\.py|doctor/|experiments/test_reproduce\.py"
    r"|bench/test_measured\.py|tasks/test_runner\.py::test_the_command|parallel/"
    r"|cli/test_cli\.py::.*(process|ctrl_c|reader)"
    r"|test_package\.py::.*(process|any_extra|no_extra)|train/test_token_shards\.py::.*memory",
    # The step of CI that has the extra `hf` runs all of its tests.
    "compiler": r"(?!hf/).*::.*(compile|opcheck|export)",
    "interpreter": r"kernels/test_(triton|segments|windows|recording|first_call)"
    r".*\.py|ops/test_contract_kernels\.py|bench/test_neighbours\.py"
    r"|nn/test_nodes\.py::test_(norms_and_weights|a_norm_that|a_hook_is)"
    r"|ops/test_gluon(_gradients|_products|_wide_scan|_segment_scan)?\.py"
    r"|ops/test_(recurrent_step|gate_logits|pools)\.py::.*\[triton",
    "grid": r"nn/test_(mixers|training|on_gpu)\.py"
    r"|nn/test_rules\.py::test_gradients|nn/test_feature_maps\.py::test_every_combination"
    r"|models/test_(train_options|drafted)\.py|models/test_decoder\.py::test_tokens_on_buffers"
    r"|ops/test_(on_gpu|neighbours)\.py"
    r"|ops/test_mesa\.py::test_converges"
    r"|ops/test_contract\.py::test_(gradcheck|runs_without|function_transforms|packed|a_carried"
    r"|any_memory|a_row_alone|empty_tokens|autocast|no_value_of"
    r"|(outputs_and_gradients|a_mode_that_watches).*\[packed)"
    r"|kernels/test_torch\.py::test_(resets|half_precision)"
    r"|experiments/test_.*\[.*gpu",
}
# Parts of which the first case of every test stays in the default run.
SAMPLED = ("interpreter", "grid")


def part_of(item: pytest.Item) -> str | None:
    """The marker of a test that the default run leaves out; None for one that it keeps."""
    name = item.nodeid.removeprefix("tests/")
    part = next((part for part, pattern in PARTS.items() if re.match(pattern, name)), None)
    return None if part in SAMPLED and is_first_case(item) else part


def is_first_case(item: pytest.Item) -> bool:
    """Whether this is the only case of a test, or the first of each of its parameters."""
    callspec = getattr(item, "callspec", None)
    return callspec is None or not any(callspec.indices.values())
