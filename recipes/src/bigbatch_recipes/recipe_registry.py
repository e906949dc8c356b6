"""The recipes and the experiments by name."""

from bigbatch.errors import SettingError
from bigbatch_recipes.bert_pretrain import BERT_PRETRAIN
from bigbatch_recipes.char_lm import CHAR_LM
from bigbatch_recipes.cifar10_resnet18 import CIFAR10_RESNET18
from bigbatch_recipes.cifar10_resnet56 import CIFAR10_RESNET56
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.dlrm import DLRM_CRITEO
from bigbatch_recipes.fashion_mnist import FASHION_MNIST
from bigbatch_recipes.imagenet_resnet50 import IMAGENET_RESNET50
from bigbatch_recipes.recipe import Recipe
from bigbatch_recipes.settings import require_choice
from bigbatch_recipes.squad import SQUAD

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
        DLRM_CRITEO,
    )
}


# what does not train one model, and has no settings, arms or checkpoints: a description of each in
# one line; `run` of its module writes it, and returns a table
EXPERIMENTS = {
    "linear-regression": "figures 1 and 3 of the VRGD paper, both upper clips, five input "
    "distributions"
}


def get_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        SettingError: the name is unknown, or that of an experiment.
    """
    require_choice("recipe", name, (*RECIPES, *EXPERIMENTS))
    if name in EXPERIMENTS:
        raise SettingError(f"recipe {name!r} has no single training; run it as a whole")
    return RECIPES[name]
