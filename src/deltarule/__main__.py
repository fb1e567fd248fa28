"""`python -m deltarule`, which torchrun starts on every process."""

import sys

from deltarule.cli import main

sys.exit(main())
