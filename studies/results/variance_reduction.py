"""Do variance-reduced optimizers bear larger rates, and are they better at large batches?

docs/results/vr-optimizers.md has the hypotheses and the rule, which were written before the runs.
"""

from typing import Any

from bigbatch_recipes.sweep_results import SweepResults
from studies.results.batch_comparisons import MLP, UNMEASURED
from studies.results.comparison import Arms, Comparison

CHANCE = 10.0  # accuracy of ten classes, in percent
STABLE_ABOVE = CHANCE + 40.0
COMPOSED = ("momentum", "adam", "lars", "lamb")  # the optimizers of the paper's figure 2
BATCHES = {"sgd": (4096,), **dict.fromkeys(COMPOSED, (64, 512, 4096))}
SMALLEST, LARGEST = 64, 4096

BASE, BEST_CLIPS = "base", "best clips"
CLIPS = {"r_max 1": 1.0, "r_max 10": 10.0}  # equation 9, and 1 / gamma
PRINTED = "r_max 1"
REFINED = ("momentum", "adam")  # optimizers of which more versions are trained with 4,096 samples
SHORTENED = ("sgd", "momentum")  # those whose steps a common factor of r shortens
GAMMAS = (0.01, 0.1, 0.5)  # lower clips that the best is chosen from

_VR = {"groups": 8}  # k = 8 with every batch
_FEWER = 3  # rates of more versions

# number of rates, and the smallest of the grid of each base: chosen by a look at the bases, and at
# the versions with 4,096 samples, with the seed that tunes and on held-out samples, so that the
# best rate is inside and the largest is unstable
_RATES = {**dict.fromkeys(BATCHES, 5), "adam": 6}
_FIRST_RATES = {
    "sgd": {4096: 0.1},
    "momentum": {64: 0.025, 512: 0.025, 4096: 0.05},
    "adam": {64: 0.002, 512: 0.008, 4096: 0.002},
    "lars": {64: 2.0, 512: 4.0, 4096: 4.0},
    "lamb": {64: 0.004, 512: 0.016, 4096: 0.032},
}
_LOWER = {"sgd": 0.25, "momentum": 0.25, "lars": 0.5}  # factors of the grids with r_max 10


def arm_of(optimizer: str, version: str, batch: int) -> str:
    """Name of an arm: a base, or a version of variance reduction over it."""
    name = optimizer if version == BASE else f"vr-{optimizer}, {version}"
    return f"{name}; {batch}"


def mean_rate_of(optimizer: str, batch: int) -> str:
    """Name of the base at the mean rate of the version with r_max 1."""
    return f"{optimizer} at the mean rate of {arm_of(optimizer, PRINTED, batch)}"


def grid_of(optimizer: str, batch: int, factor: float = 1.0) -> tuple[float, ...]:
    """The learning rates that an arm is tuned over."""
    return tuple(factor * _FIRST_RATES[optimizer][batch] * 2**n for n in range(_RATES[optimizer]))


def _base(optimizer: str, batch: int) -> dict[str, Any]:
    return {"optimizer": optimizer, "batch_size": batch, **UNMEASURED}


def _versions(optimizer: str, batch: int) -> Arms:
    """A base, and its version with each upper clip."""
    vr = {"optimizer": f"vr-{optimizer}", "batch_size": batch, **_VR}
    rates = grid_of(optimizer, batch)
    arms = {BASE: {**_base(optimizer, batch), "lr": rates}}
    for version, r_max in CLIPS.items():
        lower = 1.0 if version == PRINTED else _LOWER.get(optimizer, 1.0)
        arms[version] = {**vr, "r_max": r_max, "lr": grid_of(optimizer, batch, lower)}
    if optimizer in REFINED and batch == LARGEST:
        clips = {"gamma": GAMMAS, "r_max": tuple(CLIPS.values())}
        arms[BEST_CLIPS] = {**vr, **clips, "lr": rates[:_FEWER]}
    return {arm_of(optimizer, version, batch): changes for version, changes in arms.items()}


def _arms(_: object) -> Arms:
    return {
        arm: changes
        for optimizer, batches in BATCHES.items()
        for batch in batches
        for arm, changes in _versions(optimizer, batch).items()
    }


def _controls(results: SweepResults) -> Arms:
    """The bases at the rate of their VR version times the mean r of its run of the same seed."""
    points = {str(point.values["arm"]): point for point in results.shown}
    controls: dict[str, dict[str, Any]] = {}
    for optimizer in SHORTENED:
        for batch in BATCHES[optimizer]:
            point = points[arm_of(optimizer, PRINTED, batch)]
            controls[mean_rate_of(optimizer, batch)] = {
                **_base(optimizer, batch),
                "lr": (point.values["lr"],),
                "lr_control_from": str(results.path.resolve() / f"{point.name}-seed{{seed}}"),
            }
    return controls


COMPARISON = Comparison(
    name="variance-reduction",
    recipe="fashion-mnist",
    settings={
        **MLP,
        "policy": "fixed",
        "micro_batch": 8192,
        "max_batch": 8192,
        "lr_scaling": "none",
        "evaluate_every": "60K samples",
        "gap": True,
    },
    arms=_arms,
    seeds=8,
    tune_seeds=1,
    controls=_controls,
)
