"""The example for torchtitan trains with its own trainer, the same on one and two processes.

torchtitan installs beside PyTorch's newest release but does not name it: the output says which
pair ran. CI has none of it; `pip install torchtitan==0.3.0` in an environment of its own.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_training import write_corpus

from deltarule.models import CausalLM, ModelConfig
from deltarule.train.token_shards import DataRun, write_data

SCRIPT = Path(__file__).with_name("titan_run.py")
EXAMPLE = Path(__file__).parents[2] / "examples/torchtitan/deltarule_titan.py"
STEP = re.compile(r"step:\s*(\d+).*?loss:\s*([\d.]+).*?grad_norm:\s*([\d.]+)")
needs_torchtitan = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)


def train(folder: Path, processes: int, *flags: str) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step, as torchtitan tells them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(SCRIPT), *flags], cwd=folder, capture_output=True, text=True, timeout=240
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-4000:]
    print(told.splitlines()[0])
    plain = re.sub(r"\x1b\[[\d;]*m", "", told)
    return {int(n): (float(loss), float(norm)) for n, loss, norm in STEP.findall(plain)}


@needs_torchtitan
def test_it_trains_alike_on_one_and_two_and_its_export_is_ours(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_data(DataRun(tmp_path / "corpus.txt", tmp_path / "tokens"))
    one = train(tmp_path, 1)
    export = ("--checkpoint.enable", "--checkpoint.last_save_in_hf", "--dump_folder", "dump")
    two = train(tmp_path, 2, *export, "--checkpoint.last_save_model_only")
    assert list(one) == list(two) == list(range(1, 9))
    assert one[8][0] < one[1][0]
    for step, figures in one.items():
        assert two[step] == pytest.approx(figures, rel=2e-4)
    (file,) = tmp_path.glob("dump/checkpoint/step-8/*.safetensors")
    model = CausalLM(
        ModelConfig(
            vocab_size=257, hidden_size=48, num_layers=2, num_heads=2, head_k_dim=8,
            head_v_dim=16, layer_types=("gated_deltanet", "attention"),
        )
    )  # fmt: skip
    model.load_state_dict(load_file(file))


def test_the_registration_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 100
