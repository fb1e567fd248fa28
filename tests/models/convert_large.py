"""Convert a checkpoint of 10 GB in shards of 5 GB, and copy the same folder: seconds and memory.

    PYTHONPATH=tests python tests/models/convert_large.py FOLDER FIGURES.json

The checkpoint has the names and shapes of a Qwen3.5 and random bfloat16 values; FOLDER holds it,
the converted one and a copy, and is emptied afterwards. Files are not in memory before each.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

GIGABYTES, SHARD = 10.0, 5e9
SIZES = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 13824, "num_hidden_layers": 17,
    "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


def shapes() -> dict[str, torch.Size]:
    """Of a Qwen3.5 of 10 GB or a little more, without its memory."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, {name: x.shape for name, x in model.state_dict().items()}


def write(folder: Path) -> float:
    """Write the shards and their index; return the size in GB."""
    folder.mkdir(parents=True)
    config, wanted = shapes()
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(written | {"architectures": ["Qwen3_5ForCausalLM"]})
    )
    shards, index, sizes = [{}], {}, [0]
    for name, shape in wanted.items():
        bytes_ = 2 * shape.numel()
        if sizes[-1] + bytes_ > SHARD:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = shape
        sizes[-1] += bytes_
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: torch.randint(0, 2**14, tuple(shape), dtype=torch.int16).view(torch.bfloat16)
            for name, shape in shard.items()
        }
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    whole = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return sum(sizes) / 1e9


def measured(command: list[str]) -> dict[str, float]:
    """Seconds of a process and of writing its files out, and the most memory it held."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    start, watched = time.perf_counter(), {"VmHWM": 0, "RssAnon": 0}
    process = subprocess.Popen(command)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for line in lines:
            name, _, value = line.partition(":")
            if name in watched:
                watched[name] = max(watched[name], int(value.split()[0]))
        time.sleep(0.02)
    assert process.wait() == 0
    finished = time.perf_counter() - start
    subprocess.run(["sync"], check=True)
    return {
        "seconds": finished, "seconds_with_sync": time.perf_counter() - start,
        "peak_gb": watched["VmHWM"] * 1024 / 1e9, "peak_own_gb": watched["RssAnon"] * 1024 / 1e9,
    }  # fmt: skip


def main() -> None:
    """Write, convert, copy, and report."""
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    source, converted, copied = (folder / name for name in ("source", "converted", "copied"))
    report = {"gigabytes": write(source), "shards_gb": SHARD / 1e9}
    report["files"] = {x.name: os.path.getsize(x) for x in sorted(source.iterdir())}
    for _ in range(2):
        for name, command, made in (
            ("copy", ["cp", "-r", source, copied], copied),
            (
                "convert",
                [sys.executable, "-m", "deltarule", "convert", source, converted],
                converted,
            ),
        ):
            report.setdefault(name, []).append(measured([str(x) for x in command]))
            print(name, report[name][-1], flush=True)
            output.write_text(json.dumps(report, indent=1) + "\n")
            subprocess.run(["rm", "-r", made], check=True)
    subprocess.run(["rm", "-r", source], check=True)


if __name__ == "__main__":
    main()
