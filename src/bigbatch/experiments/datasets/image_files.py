"""Images that are decoded and cropped on access.

A random crop depends on the seed, the epoch and the image's number alone: a training that resumes
after a kill sees the same crops, whatever the number of its workers and ranks.
"""

import io
from collections.abc import Callable, Sequence

import numpy
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigbatch.errors import RunError
from bigbatch.experiments.datasets.image_splits import Split
from bigbatch.experiments.datasets.in_memory import BatchDataset

Crop = Callable[[Image.Image, Generator], Image.Image]


class ImageFiles(BatchDataset):
    """The images of a split, cropped to one size.

    Args:
        split: the images and their labels.
        crop: crops an RGB image to the size of all; may draw from the generator.
        seed: seed of the crops.
    """

    def __init__(self, split: Split, crop: Crop, seed: int = 0) -> None:
        self._split = split
        self._labels = torch.tensor(split.labels)
        self._crop = crop
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._labels)

    def set_epoch(self, epoch: int) -> None:
        """Draws other crops than in the epochs before."""
        self._epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch: bytes (N, 3, height, width), in memory with the channels last, and labels (N,).

        Raises:
            RunError: an image is damaged or missing.
        """
        pixels = numpy.stack([self._pixels_of(int(index)) for index in indices])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), self._labels[list(indices)]

    def _pixels_of(self, index: int) -> NDArray[numpy.uint8]:
        generator = numpy.random.default_rng([self._seed, self._epoch, index])
        return numpy.asarray(self._crop(_decode(self._split, index), generator))


def _decode(split: Split, index: int) -> Image.Image:
    """An image as RGB, whatever its file has."""
    data = split.read(index)
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RunError(
            f"{split.name(index)} is damaged ({error}); replace it by a good copy"
        ) from error
