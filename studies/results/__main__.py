"""Draws the tables and figures of docs/results.md, or trains for them again.

python -m studies.results draw
python -m studies.results train batch-mlp --data DIR --jobs 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import BigbatchError
from bigbatch.log.atomic_files import write_atomically
from studies.results.comparison_log import log_text
from studies.results.questions import QUESTIONS, draw


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the two commands; a mistake is one line."""
    parser = argparse.ArgumentParser(prog="python -m studies.results", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="all figures and tables from the logs")
    training = commands.add_parser("train", help="one comparison, and its log; what is left")
    training.add_argument("name", choices=QUESTIONS)
    training.add_argument("--data", type=Path, help="folder of data folders")
    training.add_argument("--jobs", type=int, help="runs at a time [cores / threads]")
    training.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of the runs")
    for command in (drawing, training):
        command.add_argument("--logs", type=Path, default=Path("docs/results"), help="their folder")
    given = parser.parse_args(arguments)
    try:
        if given.command == "draw":
            written = draw(given.logs)
        else:
            folder = given.runs_dir / f"results-{given.name}"
            log = QUESTIONS[given.name].comparison.train(folder, given.data, given.jobs)
            given.logs.mkdir(parents=True, exist_ok=True)
            written = [given.logs / f"{given.name}.json"]
            write_atomically(written[0], log_text(log).encode())
    except BigbatchError as error:
        parser.exit(1, f"{error}\n")
    for path in written:
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
