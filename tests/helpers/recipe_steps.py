"""One epoch of a recipe on each rank, for tests of ranks."""

import torch

from bigbatch_recipes.recipe_registry import get_recipe
from bigbatch_recipes.train_run import Training


def few_steps(rank, ranks, settings):
    """The sum of each weight tensor after an epoch, and the scores."""
    torch.set_num_threads(1)
    training = Training(get_recipe(settings.recipe), settings)
    for _ in training.train.epochs(1):
        for step in training.train:
            for batch in step:
                step.backward(training.loss(batch))
            step.update()
    sums = [parameter.double().sum().item() for parameter in training.model.parameters()]
    return sums, training.scores()
