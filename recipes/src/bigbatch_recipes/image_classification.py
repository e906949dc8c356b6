"""Image classification: normalisation, augmentation on the device, loss and accuracy.

A batch is (images, labels): bytes (N, channels, height, width) and int64 (N,).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from bigbatch_recipes.datasets.in_memory import InMemoryDataset, scored_indices
from bigbatch_recipes.distributed_eval import accuracy_and_loss
from bigbatch_recipes.recipe import Data, LossOf
from bigbatch_recipes.settings import Settings

ImageBatch = tuple[Tensor, Tensor]
_VECTOR = 8  # elements of float32

TEST = "test accuracy, %"
TEST_LOSS = "test loss"
HELD_OUT = "held-out accuracy, %"
GAP = "train minus test, %"


class OfBytes(nn.Module):
    """A network behind the normalisation of its images.

        network((x / 255 - mean) / std)

    Args:
        network: takes normalised images; its weights are converted to channels_last, which is
            faster on CPUs and GPUs, unless oneDNN would write out of bounds.
        mean, std: mean and standard deviation of each channel of the training images, in [0, 1].
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if not any(map(_overflows_in_onednn, network.modules())):
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network = network
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, 255 * torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of images of bytes."""
        out: Tensor = self.network((x - self.mean) / self.std)
        return out


def _overflows_in_onednn(module: nn.Module) -> bool:
    """Whether oneDNN's backward for channels_last, on a CPU with AVX2, writes out of bounds.

    Found with torch 2.13: strided 1 x 1 convolutions with fewer channels than a vector has elements
    fail with `free(): invalid next size` or a segmentation fault.
    """
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels < _VECTOR
    )


def random_shift_and_flip(x: Tensor, padding: int = 4) -> Tensor:
    """Each image shifted by up to `padding` pixels over black, and flipped with probability 1/2.

    A random crop of the padded image, and a random flip, for a whole batch on its device; draws
    from torch's generator.
    """
    samples, channels, height, width = x.shape
    device = x.device
    top, left = torch.randint(2 * padding + 1, (2, samples, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    flips = torch.randint(2, (samples, 1), device=device) == 1
    columns = torch.where(flips, columns.flip(1), columns)
    padded = functional.pad(x, (padding, padding, padding, padding))
    sample = torch.arange(samples, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def class_loss(
    label_smoothing: float = 0.0, augment: Callable[[Tensor], Tensor] | None = None
) -> LossOf:
    """A loss: the mean cross-entropy of a micro-batch.

    Args:
        label_smoothing: share of the label that is spread over all classes.
        augment: augments the images while the model is in training mode.
    """

    def loss_of(model: nn.Module, batch: ImageBatch) -> Tensor:
        images, labels = batch
        if model.training and augment is not None:
            images = augment(images)
        return functional.cross_entropy(model(images), labels, label_smoothing=label_smoothing)

    return loss_of


def accuracies(
    test: Dataset[Any], settings: Settings, train: Dataset[Any] | None = None
) -> Callable[[nn.Module], dict[str, float]]:
    """The scores of a model: test accuracy and loss; with training images also the gap."""

    def scores(model: nn.Module) -> dict[str, float]:
        test_accuracy, test_loss = accuracy_and_loss(model, test, settings)
        if train is None:
            return {TEST: test_accuracy, TEST_LOSS: test_loss}
        train_accuracy, _ = accuracy_and_loss(model, train, settings)
        return {
            TEST: test_accuracy,
            TEST_LOSS: test_loss,
            f"train accuracy, % ({len(train):,} samples)": train_accuracy,  # type: ignore[arg-type]
            GAP: train_accuracy - test_accuracy,
        }

    return scores


def data_of(
    train: InMemoryDataset, test: Dataset[Any], settings: Settings, *, gap: bool = False
) -> Data:
    """Images that are trained on without augmentation in the data set, and their scores.

    With `gap` also the scores of as many training images as there are test images.
    """
    scored = scored_indices(len(train), settings.samples, len(test))  # type: ignore[arg-type]
    gap_images = InMemoryDataset(*train.__getitems__(scored)) if gap else None
    return Data(
        train,
        accuracies(test, settings, gap_images),
        lambda images: lambda model: {HELD_OUT: accuracy_and_loss(model, images, settings)[0]},
    )


def examples(channels: int, size: int) -> Callable[[Settings, int], ImageBatch]:
    """The `example` of a recipe with images of this shape."""

    def example(settings: Settings, samples: int) -> ImageBatch:
        images = torch.empty(samples, channels, size, size, dtype=torch.uint8, device="meta")
        return images, torch.empty(samples, dtype=torch.long, device="meta")

    return example
