"""What the supervisor tells the script's processes, through one environment variable."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

VARIABLE = "MECHANIC_RUN"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How `mechanic run` treats the optimizers of a script."""

    spool: str | None = None
    """The folder for the recorded steps; None if nobody reads them."""
    tuner: dict[str, Any] = field(default_factory=dict)
    """Options of `mechanize`."""
    only: tuple[str, ...] = ()
    """Names of the classes to tune; all classes if empty."""
    skip: tuple[str, ...] = ()
    """Names of the classes to leave alone."""
    dry_run: bool = False
    """Record the steps, but tune nothing."""
    freeze_after: int | None = None
    """Hold the scale after this many steps."""

    def chooses(self, name: str) -> bool:
        """Whether a class of this name is to be tuned.

        >>> RunSettings(only=("Adam*",), skip=("AdamW",)).chooses("Adam")
        True
        """
        wanted = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in self.skip)

    def to_environment(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


def from_environment(environment: Mapping[str, str] = os.environ) -> RunSettings:
    """The settings that the supervisor has given to this process.

    >>> from_environment({VARIABLE: RunSettings(only=("AdamW",)).to_environment()}).only
    ('AdamW',)
    """
    values: dict[str, Any] = json.loads(environment[VARIABLE])
    names = {field: tuple(values[field]) for field in ("only", "skip")}
    return RunSettings(**{**values, **names})


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports, as far as its environment tells. In a distributed run only the
    first rank does.

    >>> is_first_rank({"RANK": "1"}), is_first_rank({"RANK": "0"}), is_first_rank({})
    (False, True, True)
    """
    rank = environment.get("RANK", "")
    return not rank.isdecimal() or int(rank) == 0
