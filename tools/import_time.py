"""What `import deltarule.ops` adds to `import torch`, in seconds."""

import subprocess
import sys

NAME = "deltarule.ops"
STATEMENT = f"import torch; import {NAME}"
RUNS = 3


def main() -> None:
    """Print the least of a few runs, and the slowest modules that come with ours."""
    best = min((seconds_after_torch() for _ in range(RUNS)), key=lambda times: times[NAME])
    print(f"import {NAME} adds {best[NAME]:.3f} s to import torch; with all below it:")
    for name, seconds in sorted(best.items(), key=lambda item: -item[1])[:10]:
        print(f"  {name:40} {seconds:.3f} s")


def seconds_after_torch() -> dict[str, float]:
    """Seconds of every module that is imported once torch is there."""
    command = [sys.executable, "-X", "importtime", "-c", STATEMENT]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    times: dict[str, float] = {}
    for line in report.splitlines():
        _, cumulative, name = line.removeprefix("import time:").split("|")
        if name == " torch":
            times.clear()
        elif cumulative.strip().isdigit():
            times[name.strip()] = int(cumulative) / 1e6
    return times


if __name__ == "__main__":
    main()
