"""Made logs of comparisons: runs whose scores and curves the test chooses."""

from studies.results.comparison_log import ComparisonLog, LoggedRun
from studies.results.step_cost import StepCost

SCORE = "test accuracy, %"
COST = StepCost(fixed=1e-3, per_sample=1e-5, gradient_bytes=0)


def fresh(arm, seed, score=90.0, *, lr=0.1, reached_at=10, **changes):
    """A run of 100 steps of 64 samples; its score is reached at a step, or never with None."""
    curve = () if reached_at is None else ((64 * reached_at, reached_at, 1.0, score),)
    values = {
        "samples": 6400,
        "steps": 100,
        "seconds": 2.0,
        "scores": {SCORE: score, "test loss": 0.5},
        "curve": ((64, 1, 0.1, None), *curve),
    }
    return LoggedRun(arm, lr, seed, tuning=False, **{**values, **changes})


def tuning(arm, seed=1000, score=90.0, *, lr=0.1):
    return LoggedRun(arm, lr, seed, tuning=True, scores={"held-out accuracy, %": score})


def log_of(*runs, higher_is_better=True):
    arms = {run.arm: {} for run in runs}
    about = {"arms": arms, "rates": [], "seeds": 0, "tune_seeds": 1}
    return ComparisonLog(about, higher_is_better, COST, list(runs))
