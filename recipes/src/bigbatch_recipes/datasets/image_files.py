"""Images that are decoded and cropped on access.

A random crop depends on the seed, the epoch and the image's number alone: a training that resumes
after a kill sees the same crops, whatever the number of its workers and ranks.
"""

import io
import math
from collections.abc import Callable, Sequence

import numpy
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.image_splits import Split
from bigbatch_recipes.datasets.in_memory import BatchDataset

Crop = Callable[[Image.Image, Generator], Image.Image]

_ATTEMPTS = 10  # draws of a crop that lies inside the image


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


def random_resized_crop(
    image: Image.Image, generator: Generator, *, size: int, min_area: float = 0.08
) -> Image.Image:
    """A random crop of random proportions, resized to `size` x `size`, flipped half of the time.

    Args:
        image: an image of any size.
        generator: draws crop and flip.
        size: width and height in pixels.
        min_area: smallest crop as a share of the image's area.
    Source:
        The training crops of Szegedy et al. 2014 (arXiv 1409.4842), section 6: 8 to 100 % of the
        area, sides 3:4 to 4:3; the middle where ten draws do not fit.
    """
    crop = image.crop(_draw_box(image.width, image.height, generator, min_area))
    crop = crop.resize((size, size), Image.Resampling.BILINEAR)
    flips = generator.random() < 0.5
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips else crop


def _draw_box(
    width: int, height: int, generator: Generator, min_area: float
) -> tuple[int, int, int, int]:
    """Left, top, right and bottom."""
    for _ in range(_ATTEMPTS):
        area = width * height * generator.uniform(min_area, 1.0)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(generator.integers(width - w + 1))
            top = int(generator.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def resize_and_center_crop(
    image: Image.Image, _: Generator, *, resize: int, size: int
) -> Image.Image:
    """The center of the image after its shorter side is resized; draws nothing.

    Args:
        image: an image of any size.
        resize: pixels of the shorter side.
        size: width and height of the crop in pixels.
    """
    shorter = min(image.size)
    width, height = (resize * side // shorter for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size))
