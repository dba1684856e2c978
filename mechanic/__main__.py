"""Lets `python -m mechanic` do what the command `mechanic` does."""

import sys

from mechanic.cli import main

if __name__ == "__main__":
    sys.exit(main())
