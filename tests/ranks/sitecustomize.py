"""On the path of scripts that are run as users run them, for what torchrun starts among them.

At the usual end of such a rank a thread of gloo may ask for an interpreter that is gone, and then
the process aborts or never ends (pytorch issue 190489). A rank that has raised nothing ends here,
before that.
"""

import atexit
import os
import sys


def leave() -> None:
    if not hasattr(sys, "last_type"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if "LOCAL_RANK" in os.environ:
    atexit.register(leave)
