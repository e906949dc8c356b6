"""What a branch test found."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BranchTestResult:
    """What a branch test found. All numbers are over all ranks, and the same on each.

    Args:
        batch_sizes: batch size of each branch.
        lr_factors: factor of each branch's learning rate, by the loop's rule.
        samples: samples that each branch trained on.
        held_aside: samples on which the losses of a repeat were compared.
        first_losses: loss before the branches, by repeat.
        losses: loss after each branch: for each batch size, by repeat.
        critical_batch: B_crit in samples; inf if larger batches lose nothing, nan if unknown.
        interval: 90 % confidence interval of B_crit; 0 or inf where it has no end.
        noise_scale: B_simple at the time, averaged; nan or inf if it was not measured.
        samples_spent: samples of forward and backward; an evaluation counts a third of its samples.
        reason: why an end of the interval is missing; empty if both are known.
    """

    batch_sizes: tuple[int, ...]
    lr_factors: tuple[float, ...]
    samples: int
    held_aside: int
    first_losses: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    critical_batch: float
    interval: tuple[float, float]
    noise_scale: float
    samples_spent: int
    reason: str

    @property
    def ratio(self) -> float:
        """B_crit / B_simple; nan unless B_simple is positive and finite."""
        known = math.isfinite(self.noise_scale) and self.noise_scale > 0
        return self.critical_batch / self.noise_scale if known else math.nan

    def __str__(self) -> str:
        low, high = self.interval
        lines = [
            f"critical batch {self.critical_batch:.4g} ({low:.4g} to {high:.4g}), "
            f"{self.ratio:.3g} x noise scale {self.noise_scale:.4g}"
            + (f"; {self.reason}" if self.reason else ""),
            f"{'batch':>8}  {'rate':>8}  {'loss':>10}  from {_mean(self.first_losses):.6g} in "
            f"{self.samples} samples, {len(self.first_losses)} repeats",
        ]
        rows = zip(self.batch_sizes, self.lr_factors, self.losses, strict=True)
        lines += [
            f"{size:>8}  x {factor:<6.3g}  {_mean(losses):>10.6g}" for size, factor, losses in rows
        ]
        return "\n".join(lines)


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)
