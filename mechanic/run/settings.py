"""What the supervisor tells the processes of the script, through one environment variable."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

VARIABLE = "MECHANIC_RUN"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the optimizers of a script are to be treated."""

    spool: str | None = None
    """The folder for the notes; None where nobody reads them"""
    tuner: dict[str, Any] = field(default_factory=dict)
    """Options of `mechanize`"""
    only: tuple[str, ...] = ()
    """Names of the classes to tune; all if empty"""
    skip: tuple[str, ...] = ()
    """Names of the classes to leave alone"""
    dry_run: bool = False
    """Watch, and change nothing"""
    freeze_after: int | None = None
    """Hold the scale after so many steps"""

    def chooses(self, name: str) -> bool:
        """Whether a class of this name is to be tuned.

        >>> Settings(only=("Adam*",), skip=("AdamW",)).chooses("Adam")
        True
        """
        wanted = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in self.skip)

    def to_environment(self) -> str:
        """As the value of the variable."""
        return json.dumps(asdict(self))


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the process that asks.

    >>> from_environment({VARIABLE: Settings(only=("AdamW",)).to_environment()}).only
    ('AdamW',)
    """
    values: dict[str, Any] = json.loads(environment[VARIABLE])
    lists = {name: tuple(values[name]) for name in ("only", "skip")}
    return Settings(**{**values, **lists})


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process reports, as far as the environment tells: of a distributed run, one.

    >>> is_first_rank({"RANK": "1"}), is_first_rank({"RANK": "0"}), is_first_rank({})
    (False, True, True)
    """
    rank = environment.get("RANK", "")
    return not rank.isdecimal() or int(rank) == 0
