"""A small network on Fashion-MNIST: fixed and measured batches in a minute on two cores.

A residual network, or a perceptron without BatchNorm (network = mlp).

A demonstration, of no paper.

Source of the data: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, arXiv 1708.07747.
"""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets.files import DatasetLocation
from bigbatch_recipes.datasets.idx_files import read_images
from bigbatch_recipes.models.resnet import resnet_of_three_stages
from bigbatch_recipes.recipe import OURS, Data, Grid, Recipe, Sweep, sourced
from bigbatch_recipes.settings import Settings, require_choice
from bigbatch_recipes.vrgd_paper import CLIPS

_ORIGIN = DatasetLocation(
    name="Fashion-MNIST",
    folders=("fashion-mnist", "FashionMNIST/raw"),
    files=("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    other_files=(
        "train-labels-idx1-ubyte.gz",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ),
    source="Zalando Research, github.com/zalandoresearch/fashion-mnist",
    size="70,000 images of 28 x 28 in 10 classes, 29 MiB",
)
_SIZE, _CLASSES = 28, 10
_MEAN, _STD = (0.2860,), (0.3530,)  # of the training images


def _model(settings: Settings) -> nn.Module:
    name = str(settings.task["network"])
    require_choice("network", name, _NETWORKS)
    return image_classification.OfBytes(_NETWORKS[name](settings), _MEAN, _STD)


def _resnet(settings: Settings) -> nn.Module:
    depth, width = int(settings.task["depth"]), int(settings.task["width"])
    return resnet_of_three_stages(depth, width, classes=_CLASSES, channels=1)


def _mlp(settings: Settings) -> nn.Module:
    hidden = settings.count("hidden")
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(_SIZE**2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, _CLASSES),
    )


def _data(settings: Settings) -> Data:
    gap = bool(settings.task.get("gap"))  # earlier runs lack it
    train, test = read_images(Path(settings.data), _ORIGIN)
    return image_classification.data_of(train, test, settings, gap=gap)


def _sweep(targets: tuple[float, ...], sizes: tuple[int, ...]) -> Sweep:
    rates = (0.05, 0.1, 0.2)
    adaptive: Grid = {"policy": ("simigrad",), "target": targets, "lr": rates}
    return Sweep(
        (adaptive, {"policy": ("fixed",), "batch_size": sizes, "lr": rates}), tuned=("lr",)
    )


_NETWORKS: dict[str, Callable[[Settings], nn.Module]] = {"resnet": _resnet, "mlp": _mlp}

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
    minutes=0.7,
    origin=_ORIGIN,
    arms={
        "fixed-64": {"policy": "fixed"},
        "fixed-1024": {"policy": "fixed", "batch_size": 1024},
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-momentum"},
    },
    sweep=_sweep((0.1, 0.3), (64, 1024)),
    paper_sweep=_sweep((0.1, 0.2, 0.3, 0.5), (64, 256, 1024, 4096)),
    model=_model,
    loss=lambda _: image_classification.class_loss(),
    data=_data,
    example=image_classification.examples(1, _SIZE),
)
