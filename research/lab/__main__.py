"""`python -m research.lab STUDY --data DIR`: see README.md beside this file."""

import argparse
import sys
from pathlib import Path

import torch

from .probe import probe
from .problems import Source
from .studies import STUDIES, study
from .tasks import choose


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m research.lab", description=__doc__)
    parser.add_argument("study", choices=["probe", *STUDIES])
    parser.add_argument("--data", type=Path, required=True, help="a folder for mechanic.bench.data")
    parser.add_argument("--tasks", nargs="+", help="groups, names or patterns: few, 'letter/*'")
    parser.add_argument("--seeds", type=int, default=3, help="how many (%(default)s)")
    parser.add_argument("--device", help="cuda where there is one, else cpu with one thread")
    parser.add_argument("--output", type=Path, help="write the tables there too, as Markdown")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    source, seeds = Source(options.data, device), range(options.seeds)
    default = "few" if options.study == "probe" else STUDIES[options.study].tasks
    try:
        tasks = choose(options.tasks or [default])
        if options.study == "probe":
            tables = probe(tasks, source, seeds)
        else:
            tables = study(options.study, tasks, source, seeds)
    except ValueError as error:  # of a task's name, or data that is not there
        sys.exit(str(error))
    made_on = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about = f"`{options.study}`, {len(tasks)} tasks, {len(seeds)} seeds"
    report = f"# {about}\n\ntorch {torch.__version__}, {made_on}.\n\n{tables}\n"
    print(report)
    if options.output is not None:
        options.output.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
