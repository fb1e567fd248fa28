"""`deltarule` on all processes of torchrun but one, which hangs before it: late.py RANK WORDS."""

import os
import sys
import time

from deltarule.cli import main

if __name__ == "__main__":
    if os.environ["RANK"] == sys.argv[1]:
        time.sleep(600)
    sys.exit(main(sys.argv[2:]))
