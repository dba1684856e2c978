"""`python -m mechanic` is `mechanic`."""

import sys

from mechanic.cli import main

if __name__ == "__main__":
    sys.exit(main())
