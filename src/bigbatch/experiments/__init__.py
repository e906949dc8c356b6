"""One file a published experiment: what to train, on which data, with which numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bigbatch.runs  # noqa: F401  # before any import of a package that the extra cli installs
from bigbatch.errors import SettingError
from bigbatch.experiments import linear_regression
from bigbatch.experiments.bert_pretrain import BERT_PRETRAIN
from bigbatch.experiments.char_lm import CHAR_LM
from bigbatch.experiments.cifar10_resnet18 import CIFAR10_RESNET18
from bigbatch.experiments.cifar10_resnet56 import CIFAR10_RESNET56
from bigbatch.experiments.digits import DIGITS
from bigbatch.experiments.dlrm import DLRM_CRITEO
from bigbatch.experiments.fashion_mnist import FASHION_MNIST
from bigbatch.experiments.glue import GLUE
from bigbatch.experiments.imagenet_resnet50 import IMAGENET_RESNET50
from bigbatch.experiments.recipe import Recipe
from bigbatch.experiments.settings import require_choice
from bigbatch.experiments.squad import SQUAD


@dataclass(frozen=True)
class Experiment:
    """A recipe that is no training of one model, and so has no settings, arms or checkpoints.

    Args:
        name: on the command line.
        summary: one line.
        run: does all of it, given the directory to make, the number of seeds, and quiet.
    """

    name: str
    summary: str
    run: Callable[[Path, int, bool], None]


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        DIGITS,
        FASHION_MNIST,
        CHAR_LM,
        CIFAR10_RESNET18,
        CIFAR10_RESNET56,
        IMAGENET_RESNET50,
        BERT_PRETRAIN,
        SQUAD,
        GLUE,
        DLRM_CRITEO,
    )
}

EXPERIMENTS: dict[str, Experiment] = {
    "linear-regression": Experiment(
        name="linear-regression",
        summary="figures 1 and 3 of the VRGD paper, both upper clips, five input distributions",
        run=linear_regression.run,
    )
}


def get_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        SettingError: there is none, or it is an experiment.
    """
    require_choice("recipe", name, (*RECIPES, *EXPERIMENTS))
    if name in EXPERIMENTS:
        raise SettingError(f"recipe {name!r} has no single training; run it as a whole")
    return RECIPES[name]
