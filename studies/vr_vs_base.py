"""VR optimizers and their base optimizers on the digits, each at its own best learning rate.

python -m studies.vr_vs_base --seeds 5
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev

from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.train_run import Training
from studies.markdown_tables import Row, show

_SCORE = "test accuracy, %"
# learning rates of the base batch, the same grid for a base and its VR optimizer
GRIDS: dict[str, Sequence[float]] = {
    "momentum": (0.005, 0.01, 0.02, 0.04, 0.08),
    "adam": (0.0005, 0.001, 0.002, 0.004, 0.008),
    "lars": (1.0, 2.0, 4.0, 8.0, 16.0),
    "lamb": (0.001, 0.002, 0.004, 0.008, 0.016),
}
_BATCH, _MICRO = 512, 64  # k = 8
_EPOCHS = 25
Results = tuple[float, float, float]
"""Test accuracy, training loss of the last steps and mean r of a training."""

_LAST_STEPS = 10  # steps that the training loss is averaged over


def rows(
    seeds: int, epochs: int = _EPOCHS, grids: Mapping[str, Sequence[float]] = GRIDS
) -> Iterator[Row]:
    """Base, VR with r_max = 1, VR with r_max = 1 / gamma, and momentum at VR's mean rate.

    Each has the learning rate of its grid with the least training loss, so test images play no part
    in the choice. The last has VR's best rate times its mean r: the control for an optimizer that
    only takes shorter steps. The other optimizers are invariant to a factor that all weights share.
    """

    def best(optimizer: str, r_max: float, grid: Sequence[float]) -> tuple[float, list[Results]]:
        trained = [
            (lr, [_train(optimizer, r_max, lr, seed, epochs) for seed in range(seeds)])
            for lr in grid
        ]
        return min(trained, key=lambda one: mean(loss for _, loss, _ in one[1]))

    for base, grid in grids.items():
        yield _row(base, *best(base, 1.0, grid))
        lr, adapted = best(f"vr-{base}", 1.0, grid)
        yield _row(f"vr-{base}, r_max = 1", lr, adapted)
        yield _row(f"vr-{base}, r_max = 10", *best(f"vr-{base}", 10.0, grid))
        if base == "momentum":
            control = lr * mean(factor for *_, factor in adapted)
            yield _row("momentum at lr x mean(r)", *best(base, 1.0, [control]))


def _row(name: str, lr: float, results: Sequence[Results]) -> Row:
    accuracies, losses, factors = zip(*results, strict=True)
    return {
        "optimizer": name,
        "best lr": f"{lr:.3g}",
        _SCORE: f"{mean(accuracies):.2f} ± {stdev(accuracies):.2f}",
        "training loss": f"{mean(losses):.4f} ± {stdev(losses):.4f}",
        "mean r": f"{mean(factors):.2f}",
    }


def _train(optimizer: str, r_max: float, lr: float, seed: int, epochs: int) -> Results:
    settings = DIGITS.settings().with_changes(
        {
            "dropout": 0.25,
            "double": False,
            "policy": "fixed",
            "batch_size": _BATCH,
            "micro_batch": _MICRO,
            "virtual_ranks": 1,
            "optimizer": optimizer,
            "r_max": r_max,
            "lr": lr,
            "seed": seed,
            "epochs": epochs,
        }
    )
    training = Training(DIGITS, settings)
    losses, factors = [], []
    for _ in training.train.epochs(settings.epochs):
        for step in training.train:
            for batch in step:
                step.backward(training.loss_of(training.wrapped_model, batch))
            record = step.update()
            losses.append(record.loss)
            gsnr = record.gsnr
            factors.append(1.0 if gsnr is None else float(gsnr.mean.mean()))
    return training.scores()[_SCORE], mean(losses[-_LAST_STEPS:]), mean(factors)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each optimizer")
    parser.add_argument("--tiny", action="store_true", help="one rate of one optimizer, one epoch")
    given = parser.parse_args(arguments)
    epochs, grids = _EPOCHS, GRIDS
    if given.tiny:
        given.seeds, epochs, grids = 2, 1, {"momentum": (0.01,)}
    title = f"digits, batch {_BATCH}, k = {_BATCH // _MICRO}, {epochs} epochs"
    show(f"{title}; mean ± standard deviation", rows(given.seeds, epochs, grids))


if __name__ == "__main__":
    main()
