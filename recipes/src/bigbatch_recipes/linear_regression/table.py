"""`bigbatch train linear-regression`: trains all arms, writes a table and both figures.

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

from bigbatch_recipes.console import plain_console
from bigbatch_recipes.linear_regression.experiment import (
    CLIPS,
    PASSES,
    STEPS,
    Arm,
    Findings,
    Spread,
    sgd,
    study,
)
from bigbatch_recipes.linear_regression.figures import figure1, figure3
from bigbatch_recipes.linear_regression.input_distributions import DISTRIBUTIONS
from bigbatch_recipes.output_directory import create_directory_atomically

COLUMNS = (
    *("inputs", "lr", "method", "mean r", "SGD, lr", "VR-SGD, lr", "SGD, lr x mean r"),
    "steps for SGD's loss",
)
_WIDTH = 200  # columns of the file
_DPI = 90
_ROUNDING = 1e-27  # the loss of weights that are exact up to float64's rounding


def run(path: Path, seeds: int, quiet: bool) -> None:
    """Trains all arms, writes the directory at once, and shows the table.

    Args:
        path: the directory; must not exist.
        seeds: runs of each arm.
        quiet: show no progress.
    Raises:
        RunError: something is at `path` already.
    """
    with create_directory_atomically(path) as folder:
        write(_train_all(seeds, quiet), folder)
        text = (folder / "table.md").read_text()
    plain_console().print(text, soft_wrap=True)
    plain_console().print(f"table and figures: {path}", soft_wrap=True)


def _train_all(seeds: int, quiet: bool) -> list[Findings]:
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
    for finding in findings:
        for row in rows_of(finding):
            table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    lines = [line.strip() for line in text.getvalue().strip().splitlines()]
    (folder / "table.md").write_text("\n".join(lines) + "\n")


def rows_of(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Both clips at every learning rate, then SGD and each clip at its own best one."""
    for lr in findings.inputs.lrs:
        for clip, method in CLIPS.items():
            yield _row(findings, f"{lr:g}", clip, sgd(lr), method(lr))
    sgd_arm = findings.best("SGD")
    for clip in CLIPS:
        arm = findings.best(clip)
        yield _row(findings, f"best: {sgd_arm.lr:.3g}, {arm.lr:.3g}", clip, sgd_arm, arm)


def _row(findings: Findings, lr: str, clip: str, sgd_arm: Arm, arm: Arm) -> tuple[str, ...]:
    losses = (findings.final(sgd_arm), findings.final(arm), findings.control(arm))
    mean, steps = findings.mean_r(arm).median, steps_text(findings.steps_needed(arm, sgd_arm))
    if losses[0].median < _ROUNDING:
        steps = "-"
    return findings.inputs.name, lr, clip, f"{mean:.3f}", *map(loss_text, losses), steps


def loss_text(loss: Spread) -> str:
    """Median [least, most]; a loss below 1e-27 is float64's rounding."""

    def text_of(value: float) -> str:
        if value < _ROUNDING:
            return "rounding"
        return f"{value:.3g}" if value < math.inf else "diverged"

    return _spread_text(loss, text_of)


def steps_text(steps: Spread) -> str:
    """Median [least, most]."""
    return _spread_text(steps, lambda value: f"{value:g}" if value < math.inf else "never")


def _spread_text(spread: Spread, text_of: Callable[[float], str]) -> str:
    middle, least, most = map(text_of, (spread.median, spread.least, spread.most))
    return middle if least == most else f"{middle} [{least}, {most}]"
