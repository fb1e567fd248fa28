"""What the patch relies on in transformers' files, so that a new version which moves it is noticed.

If one of these fails after an upgrade: see what the new function does, give it a replacement in
`deltarule/hf/patch.py` or a place in KEPT, and its model a place in `families.py`.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
import transformers

from deltarule.hf.norms import NORMS
from deltarule.hf.patch import (
    CONVOLUTIONS,
    FORWARDS,
    GATED_LAYERS,
    KEPT,
    MASKS,
    RECURRENCES,
    SHORTCUTS,
)
from hf.families import FAMILIES

MODELS = Path(transformers.__file__).parent / "models"
DECORATOR = "use_kernel_func_from_hub_with_fallback"
KNOWN = {*RECURRENCES, *SHORTCUTS, *CONVOLUTIONS, *KEPT}
# Convolutions alone, without a recurrence.
CONVOLUTIONAL = {"lfm2", "lfm2_moe", "lfm3", "inkling", "inkling2", "inkling2_loop"}
# Folders and classes that transformers has since 5.24.
SINCE = {
    "lfm3", "inkling2_loop", "LaraMiniGatedDeltaNet", "LaraMiniRMSNorm", "LaraMiniRMSNormGated",
    "LaraMiniMLP",
}  # fmt: skip
# Norms and MLPs that stay theirs: no weight, a limit, groups, another activation, an adapter.
OTHER_NORMS = {
    "FalconH1RMSNormGated", "FalconMambaWeightlessRMSNorm", "Glm5NextTextMLP",
    "Glm5NextTextUnweightedRMSNorm", "Glm5NextVisionMLP", "NemotronHMLP", "Qwen3_5MoeVisionMLP",
    "Qwen3_5VisionMLP", "Qwen4ExpTextRMSNorm", "Qwen4ExpVisionMLP", "Zamba2MLP", "ZambaMLP",
}  # fmt: skip


@pytest.fixture(scope="module")
def hooked() -> dict[str, dict[str, ast.FunctionDef]]:
    """By folder and name, the functions that look for a kernel and have a fallback."""
    texts = {file.parent.name: file.read_text() for file in MODELS.glob("*/modeling_*.py")}
    return {
        folder: {
            node.name: node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef)
            and any(DECORATOR in ast.unparse(decorator) for decorator in node.decorator_list)
        }
        for folder, text in texts.items() if DECORATOR in text
    }  # fmt: skip


def test_every_folder_and_function_is_known(hooked):
    known = set(FAMILIES) - {"minimax"} | CONVOLUTIONAL
    assert set(hooked) <= known
    assert known - set(hooked) <= SINCE
    assert {name for functions in hooked.values() for name in functions} <= KNOWN
    for folder, functions in hooked.items():
        assert bool(functions.keys() & RECURRENCES.keys()) == (folder not in CONVOLUTIONAL)


def test_replacements_take_what_the_functions_take(hooked):
    """Their arguments in their order, but for those that only say how theirs computes."""
    own = {"chunk_size", "use_mambapy", "use_associative_scan"}
    for functions in hooked.values():
        for name, node in functions.items():
            if name in RECURRENCES | CONVOLUTIONS:
                parameters = inspect.signature((RECURRENCES | CONVOLUTIONS)[name]).parameters
                theirs = [argument.arg for argument in node.args.args]
                wanted = [argument for argument in theirs if argument not in own]
                taken = [argument for argument in parameters if argument in wanted]
                assert taken == wanted, name


def test_layers_call_the_functions_by_their_names(hooked):
    """Not through self or a table, where a replaced name would change nothing."""
    for folder, functions in hooked.items():
        text = (MODELS / folder / f"modeling_{folder}.py").read_text()
        called = {
            node.func.id
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        # Some only import a shortcut.
        assert set(functions) - set(SHORTCUTS) <= called, folder


LAYERS = "GatedDeltaNet|DeltaAttention|TextLinearAttention|LightningAttention|ForgetGate"


@pytest.mark.parametrize(
    ("folders", "like", "known"),
    [
        (["*"], LAYERS, {*FORWARDS, *GATED_LAYERS}),
        (FAMILIES, "Norm|NormGated|MLP", {*NORMS, *OTHER_NORMS}),
    ],
)
def test_every_class_with_a_forward_of_ours_is_there_and_no_other_like_it(folders, like, known):
    """Layers in all folders, norms and MLPs in those of the families."""
    files = [file for folder in folders for file in MODELS.glob(f"{folder}/modeling_{folder}.py")]
    texts = "".join(map(Path.read_text, files))
    found = set(re.findall(rf"^class (\w*(?:{like}))\(", texts, re.M))
    assert found <= known
    assert known - found <= SINCE


def test_masks_are_there():
    text = (MODELS / "minimax" / "modeling_minimax.py").read_text()
    assert all(name in text for name in MASKS)
