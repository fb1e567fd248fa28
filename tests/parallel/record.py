"""Write down the figures of the long tests: python tests/parallel/record.py OUT [--kills 50].

Errors are those of 4 processes on gloo against one. In float64: the largest of loss, logits, all
gradients as whole tensors, and the clipped gradient. In float32: of the loss in 50 steps.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import text_runs
import torch
from processes import Processes
from test_contexts import NOT_LINEAR
from test_kills import kill_and_read
from test_training import MESHES, differences, go_back_to, write_corpus

from deltarule.nn import MIXERS


def worst(answers: list[dict[str, float]]) -> float:
    return max(max(answer.values()) for answer in answers)


def heads(processes: Processes) -> dict[str, Any]:
    """By mixer: all four shards, two of heads and two shards, four of heads."""
    run = "whole_models.heads_and_shards"
    return {
        mixer: {f"heads {n}, shards {4 // n}": worst(processes(run, mixer=mixer, tensor=n))
                for n in (1, 2, 4) if n == 1 or MIXERS[mixer].heads_alone}
        for mixer in MIXERS
    }  # fmt: skip


def contexts(processes: Processes) -> dict[str, Any]:
    """By mixer: packed rows over four processes, and over two beside two of heads."""
    run, options = "whole_models.context_model", {"exchange": "gather", "packed": True}
    found: dict[str, Any] = {mixer: {} for mixer in MIXERS if mixer not in NOT_LINEAR}
    for mixer, errors in found.items():
        for n in (1, 2):
            answers = processes(run, mixer=mixer, heads=n, **options)
            errors[f"context {4 // n}, heads {n}"] = worst(answers)
    return found


def curves(processes: Processes) -> dict[str, Any]:
    """By mesh; then of the next step where two processes, then one, go on with what four began."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(number)) for number in range(len(MESHES) + 1)]
        for folder in folders:
            folder.mkdir()
            write_corpus(folder)
        *several, alone = folders
        text_runs.train(str(alone))
        for folder, mesh in zip(several, MESHES, strict=True):
            processes("text_runs.train", folder=str(folder), **mesh)
            told = ", ".join(f"{axis} {size}" for axis, size in mesh.items()) or "shard 4"
            found[told] = float(differences(folder / "run", alone / "run").max())
        run, two = several[0] / "run", Processes(2)
        go_back_to(run, 20)
        two("text_runs.train", folder=str(several[0]), resume=True)
        two.close()
        go_back_to(run, 40)
        text_runs.train(str(several[0]), resume=True)
        for step, count in ((20, "two"), (40, "one")):
            error = float(differences(run, alone / "run", after=step)[0])
            found[f"step {step + 1}, of {count} that went on"] = error
    return found


def kills(times: int) -> dict[str, Any]:
    """Steps of the checkpoints that were newest, and whole, after each kill."""
    chance, steps = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(times):
            place = Path(folder)
            steps.append(kill_and_read(place / str(attempt), place / f"group-{attempt}", chance))
    return {"kills": times, "whole": len(steps), "newest_steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    command = f"python tests/parallel/record.py {arguments.out.name} --kills {arguments.kills}"
    today = datetime.now(UTC).date().isoformat()
    facts: dict[str, Any] = {"command": command, "date": today, "torch": torch.__version__}
    facts["machine"] = platform.machine()
    four = Processes(4)
    parts = (("losses", curves), ("heads and shards", heads), ("contexts", contexts))
    for name, found in parts:
        facts[name] = found(four)
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    four.close()
    if arguments.kills:
        facts["kills of one or both of two writers"] = kills(arguments.kills)
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
