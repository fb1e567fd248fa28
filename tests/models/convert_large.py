"""Convert a checkpoint of 10 GB in shards of 5 GB, and copy the same folder: seconds and memory.

    PYTHONPATH=tests python tests/models/convert_large.py FOLDER FIGURES.json

The checkpoint has the names and shapes of a Qwen3.5 and random bfloat16 values; FOLDER holds it,
the converted one and a copy, and is emptied afterwards. Files are not in memory before each.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

SIZES = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 13824, "num_hidden_layers": 17,
    "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
SHARD_GB = 5


def write(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES), dtype=torch.bfloat16)
    for parameter in model.to_empty(device="cpu").parameters():
        parameter.data.view(torch.int16).random_(2**14)
    model.save_pretrained(folder, max_shard_size=f"{SHARD_GB}GB")


def measured(command: list[str]) -> dict[str, float]:
    """Seconds of a process and of writing its files out, and the most memory it held."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    start, watched = time.perf_counter(), {"VmHWM": 0, "RssAnon": 0}
    process = subprocess.Popen(command)
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
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
    source, made = folder / "source", folder / "made"
    write(source)
    files = {path.name: path.stat().st_size for path in sorted(source.iterdir())}
    report = {"gigabytes": sum(files.values()) / 1e9, "shards_gb": SHARD_GB, "files": files}
    convert = [sys.executable, "-m", "deltarule", "convert"]
    for name, command in [("copy", ["cp", "-r"]), ("convert", convert)] * 2:
        report.setdefault(name, []).append(measured([*command, str(source), str(made)]))
        print(name, report[name][-1], flush=True)
        output.write_text(json.dumps(report, indent=1) + "\n")
        shutil.rmtree(made)
    shutil.rmtree(source)


if __name__ == "__main__":
    main()
