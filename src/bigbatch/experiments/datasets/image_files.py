"""Images that are decoded and cut when they are asked for.

What a crop draws depends on the seed, the epoch and the image's number alone: a training that
resumes after a kill sees the same crops, whatever the number of its workers and ranks.
"""

import io
from collections.abc import Callable, Sequence

import numpy
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.image_splits import Split, Stored

Crop = Callable[[Image.Image, Generator], Image.Image]


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """The images of a split, cut to one size.

    Args:
        split: where they are, and what they show.
        crop: makes an image in RGB one of the size wanted; may draw from the generator.
        seed: of the crops.
    """

    def __init__(self, split: Split, crop: Crop, seed: int = 0) -> None:
        self._stored = split.stored
        self._labels = torch.tensor(split.labels)
        self._crop = crop
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._labels)

    def set_epoch(self, epoch: int) -> None:
        """Has other crops than the epochs before."""
        self._epoch = epoch

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([number])
        return images[0], labels[0]

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch: bytes (N, 3, height, width), in memory with the channels last, and labels (N,).

        Raises:
            RunError: an image is damaged or gone.
        """
        pixels = numpy.stack([self._cut(int(number)) for number in numbers])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), self._labels[list(numbers)]

    def _cut(self, number: int) -> NDArray[numpy.uint8]:
        random = numpy.random.default_rng([self._seed, self._epoch, number])
        return numpy.asarray(self._crop(_decoded(self._stored, number), random))


def _decoded(stored: Stored, number: int) -> Image.Image:
    """An image in RGB, whatever it was stored as."""
    data = stored.read(number)
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RunError(
            f"{stored.name(number)} is damaged ({error}); replace it by a good copy"
        ) from error
