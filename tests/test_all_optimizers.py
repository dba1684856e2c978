"""The table of docs/optimizers.md is true: every optimizer is measured again.

`benchmarks/optimizers.py` wrote the table. A verdict may be off by `SLACK` on another machine.
"""

import math
import re
from importlib.metadata import version

import pytest
from optimizers import GOOD, NOT_RUN, PAGE, TYPED, VERDICTS, Row, excess, names, rows_of

SLACK = 5.0  # percent
TEXT = PAGE.read_text("utf-8")
ROWS = list(rows_of(TEXT))

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # what the optimizers of others warn of
]


def test_the_table_names_every_optimizer():
    assert sorted(row.name for row in ROWS) == sorted(names())


def test_the_page_is_of_the_version_that_is_installed():
    assert f"`pytorch_optimizer` {version('pytorch_optimizer')}" in TEXT


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_counts_are_those_of_the_table(verdict):
    (count,) = re.findall(rf"\| \*\*{verdict}\*\* \| (\d+) \|", TEXT)
    assert int(count) == sum(row.verdict == verdict for row in ROWS)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.verdict != "tuned"], ids=lambda r: r.name
)
def test_what_is_not_tuned_has_its_reason(row):
    assert row.why


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_verdict_holds(row):
    if row.verdict == "not run":
        assert row.name in NOT_RUN
    elif row.verdict == "refused":
        with pytest.raises(ValueError, match=r"\w"):
            excess(row.name, TYPED[0], row.best)
    else:
        assert_verdict(row, [excess(row.name, lr, row.best) for lr in TYPED])


def assert_verdict(row: Row, excesses: list[float]) -> None:
    assert not any(map(math.isnan, excesses))
    best, worst = min(excesses), max(excesses)
    if row.verdict == "tuned":
        assert worst <= GOOD + SLACK
    elif row.verdict == "depends":
        assert best <= GOOD + SLACK
        assert worst >= GOOD - SLACK
    else:
        assert best >= GOOD - SLACK
