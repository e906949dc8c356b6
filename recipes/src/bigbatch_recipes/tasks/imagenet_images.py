"""A ResNet of bottlenecks for ImageNet, and random crops of its files."""

from functools import partial
from pathlib import Path

from torch import nn

from bigbatch.errors import SettingError
from bigbatch_recipes import image_classification
from bigbatch_recipes.datasets import image_files
from bigbatch_recipes.datasets.in_memory import Subset, scored_indices
from bigbatch_recipes.models.resnet import resnet_of_bottlenecks
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def model(settings: Settings) -> nn.Module:
    """The network of the settings."""
    depth, width, classes = (int(settings.task[name]) for name in ("depth", "width", "classes"))
    return image_classification.OfBytes(resnet_of_bottlenecks(depth, width, classes), _MEAN, _STD)


def data(settings: Settings) -> Data:
    """Training data, and what scores a model."""
    size, resize, classes = (int(settings.task[name]) for name in ("size", "resize", "classes"))
    train_crop = partial(
        image_files.random_resized_crop, size=size, min_area=float(settings.task["smallest_part"])
    )
    test_crop = partial(image_files.resize_and_center_crop, resize=resize, size=size)
    train, val = image_files.splits_of(Path(settings.data), classes)
    scored = scored_indices(len(train.labels), settings.samples, len(val.labels))
    scored_train = Subset(image_files.ImageFiles(train, test_crop), scored)
    scores = image_classification.accuracies(
        image_files.ImageFiles(val, test_crop), settings, scored_train
    )

    def named_scores(model: nn.Module) -> dict[str, float]:
        return {f"{name} of {classes} classes": score for name, score in scores(model).items()}

    return Data(image_files.ImageFiles(train, train_crop, settings.seed), named_scores)


def loss(settings: Settings) -> LossOf:
    """The mean cross-entropy of a micro-batch, with smoothed labels."""
    return image_classification.class_loss(float(settings.task["label_smoothing"]))


def example(settings: Settings, samples: int) -> image_classification.ImageBatch:
    """A batch on the meta device."""
    size, resize = int(settings.task["size"]), int(settings.task["resize"])
    if not 0 < size <= resize:
        raise SettingError(f"size={size} must be above 0 and at most resize={resize}")
    return image_classification.examples(3, size)(settings, samples)
