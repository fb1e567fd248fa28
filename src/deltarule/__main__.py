"""The command `deltarule`, and `python -m deltarule`, which torchrun starts on every process."""

import sys

from deltarule.errors import INTERRUPTED, ended_by_ctrl_c


def main() -> int:
    """Run the process's command line; Ctrl-C ends it with one line, while imports go on, too."""
    try:
        with ended_by_ctrl_c():
            from deltarule.cli import main as run
        return run()
    except KeyboardInterrupt:
        print("deltarule: stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
