"""A small network on Fashion-MNIST: fixed and measured batches in a minute on two cores.

A residual network, or a perceptron without BatchNorm (network = mlp).

A demonstration, of no paper.

Source of the data: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, arXiv 1708.07747.
"""

from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import OURS, Grid, Recipe, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS


def _sweep(targets: tuple[float, ...], sizes: tuple[int, ...]) -> Sweep:
    rates = (0.05, 0.1, 0.2)
    adaptive: Grid = {"policy": ("simigrad",), "target": targets, "lr": rates}
    return Sweep(
        (adaptive, {"policy": ("fixed",), "batch_size": sizes, "lr": rates}), tuned=("lr",)
    )


FASHION_MNIST = Recipe(
    name="fashion-mnist",
    summary="small ResNet or MLP on Fashion-MNIST: fixed and measured batches",
    paper="a demonstration, of no paper",
    paper_scale={
        **sourced(OURS, epochs=30, target=0.3, min_batch=32, max_batch=4096, batch_size=64),
        **sourced(OURS, base_batch=64, micro_batch=256, virtual_ranks=4, lr=0.1),
        **sourced(OURS, weight_decay=5e-4),
        **CLIPS,
        **sourced(OURS, lr_schedule="warm-up 1 epoch; cosine", device="cuda", network="resnet"),
        **sourced(OURS, depth=20, width=16, hidden=128, gap=False),
    },
    small={
        "samples": 20_000,
        "epochs": 4,
        "max_batch": 1024,
        "lr_schedule": "warm-up 0.2 epochs; cosine",
        "depth": 8,
        "width": 8,
    },
    paper_samples=60_000,
    parameters=(19_074, 269_434),
    minutes=0.7,
    origin=locations.FASHION_MNIST,
    arms={
        "fixed-64": {"policy": "fixed"},
        "fixed-1024": {"policy": "fixed", "batch_size": 1024},
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-momentum"},
    },
    small_sweep=_sweep((0.1, 0.3), (64, 1024)),
    paper_sweep=_sweep((0.1, 0.2, 0.3, 0.5), (64, 256, 1024, 4096)),
    **task("fashion_images"),
)
