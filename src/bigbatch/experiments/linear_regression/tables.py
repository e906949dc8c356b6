"""The findings as tables for a person, and as numbers for a program."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from bigbatch.experiments.linear_regression.arms import (
    CLIPS,
    METHODS,
    SGD,
    DistributionFindings,
    Spread,
    against_gamma,
    against_k,
    grid,
)
from bigbatch.experiments.linear_regression.claims import ROUNDING, SUMMARY, judged, summary
from bigbatch.experiments.linear_regression.experiment import BATCH, GAMMA, GROUPS, TEST_INPUTS

_DIGITS = 8  # of a number that is written


@dataclass(frozen=True)
class Table:
    """Rows of text under columns."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables_of(findings: Sequence[DistributionFindings]) -> list[Table]:
    """What the study says, in four tables."""
    return [_steps(findings), _tuned(findings), _controls(findings), _claims(findings)]


def details_of(findings: Sequence[DistributionFindings]) -> Table:
    """Every claim at every law, learning rate and method."""
    rows: list[tuple[str, ...]] = [
        (one.claim, one.law, f"{one.lr:g}", one.method, one.verdict, one.measured)
        for found in findings
        for one in judged(found)
    ]
    return Table(
        "Every claim at every setting",
        "Each verdict is computed from the numbers next to it.",
        ("the paper's claim", "inputs", "lr", "method", "verdict", "measured"),
        sorted(rows, key=lambda row: row[0]),
    )


def _steps(findings: Sequence[DistributionFindings]) -> Table:
    rows: list[tuple[str, ...]] = []
    for found in findings:
        for lr in found.law.lrs:
            steps = [Spread.of(found.steps_needed(clip(lr))) for clip in CLIPS.values()]
            stiffness = f"{lr * found.law.curvature:.2f}"
            loss = loss_text(found.final(METHODS[SGD](lr)))
            rows.append((found.law.name, f"{lr:g}", stiffness, loss, *map(steps_text, steps)))
    return Table(
        "Steps that VR-SGD needs for SGD's loss at step 100, at the same learning rate",
        "SGD diverges from lr x curvature = 2 on, and oscillates shortly below.",
        ("inputs", "lr", "lr x curvature", "SGD's loss at 100", *CLIPS),
        rows,
    )


def _tuned(findings: Sequence[DistributionFindings]) -> Table:
    rows: list[tuple[str, ...]] = []
    for found in findings:
        for method in METHODS:
            lr, loss = found.best(method)
            soon, steps = found.soonest(method)
            cells = (f"{lr:.3g}", loss_text(loss), f"{soon:.3g}", steps_text(steps))
            rows.append((found.law.name, method, *cells))
    return Table(
        "Each at its own best learning rate",
        f"One grid for all: {len(grid(findings[0].law))} rates, lr x curvature from 0.01 to 7.2, "
        "each 1.19 times the one before. Chosen by the worst seed, on the seeds that are shown.",
        ("inputs", "method", "best lr", "last loss", "lr", "steps to 1e-6 of the first loss"),
        rows,
    )


def _controls(findings: Sequence[DistributionFindings]) -> Table:
    rows: list[tuple[str, ...]] = []
    for found in findings:
        for lr in found.law.lrs:
            for clip, make in CLIPS.items():
                arm = make(lr)
                cells = (found.final(METHODS[SGD](lr)), found.final(arm), found.control(arm))
                mean = f"{found.mean_r(arm).median:.3f}"
                rows.append((found.law.name, f"{lr:g}", clip, mean, *map(loss_text, cells)))
    return Table(
        "Control: SGD at the learning rate that VR-SGD has on average",
        "Mean r is over all weights and steps; losses are the last ones.",
        ("inputs", "lr", "method", "mean r", "SGD, lr", "VR-SGD, lr", "SGD, lr x mean r"),
        rows,
    )


def _claims(findings: Sequence[DistributionFindings]) -> Table:
    return Table(
        "What reproduces",
        "Counted over inputs and learning rates, by criteria of our own. Partly: another number of "
        "steps below 100; a value in the range within 10 % of the best; only w5, w6 before the "
        "rest; r averaged over each pair, not each weight's.",
        SUMMARY,
        summary([one for found in findings for one in judged(found)]),
    )


def loss_text(loss: Spread) -> str:
    """Median [least, most]; below 1e-27 a loss is float64's rounding."""

    def one(value: float) -> str:
        if value < ROUNDING:
            return "rounding"
        return f"{value:.3g}" if value < math.inf else "diverged"

    return _spread_text(loss, one)


def steps_text(steps: Spread) -> str:
    """Median [least, most]."""
    return _spread_text(steps, lambda value: f"{value:g}" if value < math.inf else "never")


def _spread_text(spread: Spread, one: Callable[[float], str]) -> str:
    middle, least, most = one(spread.median), one(spread.least), one(spread.most)
    return middle if least == most else f"{middle} [{least}, {most}]"


def numbers_of(findings: Sequence[DistributionFindings]) -> dict[str, Any]:
    """Everything that tables, verdicts and figures are made of; null where a run diverged."""
    seeds = next(iter(findings[0].traces.values())).losses.shape[0]
    return {
        "settings": {
            "seeds": list(range(seeds)),
            "batch": BATCH,
            "k": GROUPS,
            "gamma": GAMMA,
            "test_inputs": TEST_INPUTS,
        },
        "laws": [_law_numbers(found) for found in findings],
        "claims": [asdict(one) for found in findings for one in judged(found)],
    }


def _law_numbers(found: DistributionFindings) -> dict[str, Any]:
    law = found.law
    last = {arm: trace.losses[:, -1] for arm, trace in found.traces.items()}
    sweeps = {"gamma": against_gamma, "k": against_k}
    return {
        **asdict(law),
        "curvature": law.curvature,
        "runs": [_run_numbers(found, method, lr) for lr in law.lrs for method in METHODS],
        **{
            f"against_{what}": [
                {
                    "lr": lr,
                    "method": clip,
                    what: list(arms(clip, lr)),
                    "last_losses": [_plain(last[arm]) for arm in arms(clip, lr).values()],
                }
                for lr in law.lrs
                for clip in CLIPS
            ]
            for what, arms in sweeps.items()
        },
        "tuned": [
            {"method": method, "lr": lr, "last_losses": _plain(last[make(lr)])}
            for method, make in METHODS.items()
            for lr in grid(law)
        ],
    }


def _run_numbers(found: DistributionFindings, method: str, lr: float) -> dict[str, Any]:
    arm = METHODS[method](lr)
    trace = found.traces[arm]
    numbers: dict[str, Any] = {"lr": lr, "method": method, "losses": _plain(trace.losses)}
    if method in CLIPS:
        numbers["steps_for_sgd_loss"] = _plain(found.steps_needed(arm))
        numbers["mean_r"] = _plain(trace.r.mean((1, 2)))
        numbers["sgd_at_mean_r"] = _plain(found.controls[arm].losses[:, -1])
    if lr == found.law.shown:
        numbers["weights_median"] = _plain(trace.weights.median(0).values)
        numbers["r_median"] = _plain(trace.r.median(0).values)
    return numbers


def _plain(values: Tensor) -> Any:
    """Nested lists of rounded numbers."""

    def rounded(value: Any) -> Any:
        return [rounded(one) for one in value] if isinstance(value, list) else _finite(value)

    return rounded(values.tolist())


def _finite(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
