"""Memory of a process of its own: the most that getrusage tells begins with that of its parent."""

import subprocess
import sys

SCRIPT = """
import re, sys
from pathlib import Path
def most():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
{first}
before = most()
{then}
print(1024 * (most() - before))
"""


def growth(first: str, then: str, *words: object) -> int:
    """Bytes by which the most memory grows as `then` runs after `first`; `words` are sys.argv."""
    command = [sys.executable, "-c", SCRIPT.format(first=first, then=then), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])
