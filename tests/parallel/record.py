"""Write down the figures of the long tests: python tests/parallel/record.py OUT [--kills 50].

Errors are those of 4 processes on gloo against one, in float64: the largest of loss, logits, all
gradients as whole tensors, and the clipped gradient.
"""

import argparse
import json
import platform
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from processes import Processes
from test_contexts import NOT_LINEAR
from test_kills import kill_and_read

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
    facts = {"command": command, "torch": torch.__version__, "machine": platform.machine()}
    four = Processes(4)
    for name, found in (("heads and shards", heads), ("contexts", contexts)):
        facts[name] = found(four)
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    four.close()
    if arguments.kills:
        facts["kills of one or both of two writers"] = kills(arguments.kills)
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
