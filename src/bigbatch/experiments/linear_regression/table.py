"""`bigbatch train linear-regression`: trains everything, leaves a table and both figures.

table.md       losses, mean r and controls at every setting
figure1.png    training curves, weights, r
figure3.png    last loss against gamma and k
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bigbatch.experiments.linear_regression.experiment import STEPS, Arm
from bigbatch.experiments.linear_regression.figures import figure1, figure3
from bigbatch.experiments.linear_regression.findings import (
    CLIPS,
    METHODS,
    PASSES,
    SGD,
    Findings,
    Spread,
    study,
)
from bigbatch.experiments.linear_regression.input_distributions import DISTRIBUTIONS
from bigbatch.runs.atomic_files import create_directory_atomically
from bigbatch.runs.console import plain_console

COLUMNS = (
    *("inputs", "lr", "method", "mean r", "SGD, lr", "VR-SGD, lr", "SGD, lr x mean r"),
    "steps for SGD's loss",
)
_WIDTH = 200  # columns of the file
_DPI = 90
_ROUNDING = 1e-27  # a loss of weights that are right to float64


def run(place: Path, seeds: int, quiet: bool) -> None:
    """Trains everything, writes the directory as a whole, and shows the table.

    Args:
        place: the directory; must be free.
        seeds: runs of each arm.
        quiet: show no progress.
    Raises:
        RunError: something is at `place` already.
    """
    with create_directory_atomically(place) as folder:
        write(_measured(seeds, quiet), folder)
        text = (folder / "table.md").read_text()
    plain_console().print(text, soft_wrap=True)
    plain_console().print(f"table and figures: {place}", soft_wrap=True)


def _measured(seeds: int, quiet: bool) -> list[Findings]:
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    findings = []
    with Progress(console=plain_console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("", total=PASSES * STEPS * len(DISTRIBUTIONS))
        for inputs in DISTRIBUTIONS:
            progress.update(task, description=f"inputs {inputs.name}".ljust(19))
            findings.append(study(inputs, seeds, advance=lambda: progress.advance(task)))
    return findings


def write(findings: Sequence[Findings], folder: Path) -> None:
    """Writes the table and both figures into `folder`."""
    for name, figure in (("figure1", figure1(findings)), ("figure3", figure3(findings))):
        figure.savefig(folder / f"{name}.png", dpi=_DPI)
    table = Table(*COLUMNS, box=MARKDOWN)
    for found in findings:
        for row in rows_of(found):
            table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    lines = [line.strip() for line in text.getvalue().strip().splitlines()]
    (folder / "table.md").write_text("\n".join(lines) + "\n")


def rows_of(found: Findings) -> Iterator[tuple[str, ...]]:
    """Both clips at every learning rate, then SGD and each clip at its own best one."""
    for lr in found.inputs.lrs:
        for clip in CLIPS:
            yield _row(found, f"{lr:g}", clip, METHODS[SGD](lr), METHODS[clip](lr))
    plain = found.best(SGD)
    for clip in CLIPS:
        arm = found.best(clip)
        yield _row(found, f"best: {plain.lr:.3g}, {arm.lr:.3g}", clip, plain, arm)


def _row(found: Findings, lr: str, clip: str, plain: Arm, arm: Arm) -> tuple[str, ...]:
    losses = (found.final(plain), found.final(arm), found.control(arm))
    mean, steps = f"{found.mean_r(arm).median:.3f}", steps_text(found.steps_needed(arm, plain))
    if losses[0].median < _ROUNDING:
        steps = "-"
    return found.inputs.name, lr, clip, mean, *map(loss_text, losses), steps


def loss_text(loss: Spread) -> str:
    """Median [least, most]; below 1e-27 a loss is float64's rounding."""

    def one(value: float) -> str:
        if value < _ROUNDING:
            return "rounding"
        return f"{value:.3g}" if value < math.inf else "diverged"

    return _spread_text(loss, one)


def steps_text(steps: Spread) -> str:
    """Median [least, most]."""
    return _spread_text(steps, lambda value: f"{value:g}" if value < math.inf else "never")


def _spread_text(spread: Spread, one: Callable[[float], str]) -> str:
    middle, least, most = one(spread.median), one(spread.least), one(spread.most)
    return middle if least == most else f"{middle} [{least}, {most}]"
