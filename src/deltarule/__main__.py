"""The command `deltarule`, and `python -m deltarule`, which torchrun starts on every process."""

import os
import sys
import warnings

from deltarule.errors import INTERRUPTED, ended_by_ctrl_c


def main() -> int:
    """Run the process's command line; Ctrl-C ends it with one line, while imports go on, too."""
    # PyTorch's threads wait in a loop of 300,000 turns before they sleep. Where another program has
    # a processor, they keep it from the thread they wait for; a thirtieth of that costs 4 % alone.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Where in Python a warning arose is nothing to those who type commands.
    if "--traceback" not in sys.argv:
        warnings.formatwarning = lambda message, *_: f"deltarule: note: {message}\n"
    try:
        with ended_by_ctrl_c():
            from deltarule.cli import main as run
        return run()
    except KeyboardInterrupt:
        print("deltarule: stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
