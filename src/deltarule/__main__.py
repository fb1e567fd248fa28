"""`python -m deltarule`, which torchrun starts on every process."""

import sys

from deltarule.cli import main

if __name__ == "__main__":
    sys.exit(main())
