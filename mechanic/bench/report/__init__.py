"""`mechanic report`: shows runs as one HTML page, Markdown, CSV and PNG.

`mechanic.bench.score` turns runs into comparisons. Here, comparisons become sentences (`words`),
tables (`tables`, `excess`) and panels (`panels`). `page` and `plotly` write them as HTML, `text` as
Markdown and CSV, `figures` as PNG.
"""

from collections.abc import Sequence
from pathlib import Path

from mechanic.bench.record import Run
from mechanic.bench.report.figures import write_figures
from mechanic.bench.report.look import choose_looks
from mechanic.bench.report.page import render_page
from mechanic.bench.report.text import markdown, runs_csv, summary_csv
from mechanic.bench.score import compare


def write_report(runs: Sequence[Run], folder: Path, title: str = "Mechanic bench") -> list[Path]:
    """Write report.html, report.md, runs.csv, summary.csv and figures/*.png. Returns the paths."""
    if not runs:
        raise ValueError(
            "There are no runs to report. Run a suite first, for example `mechanic bench convex`."
        )
    comparisons = compare(runs)
    methods = [method for comparison in comparisons for method in comparison.methods]
    looks = choose_looks(methods, [comparison.default for comparison in comparisons])
    figures = write_figures(comparisons, looks, folder / "figures")
    relative = {key: path.relative_to(folder).as_posix() for key, path in figures.items()}
    files = {
        "report.html": render_page(comparisons, title, looks),
        "report.md": markdown(comparisons, title, relative),
        "runs.csv": runs_csv(runs),
        "summary.csv": summary_csv(comparisons),
    }
    for name, content in files.items():
        (folder / name).write_text(content, "utf-8")
    return [*(folder / name for name in files), *figures.values()]
