"""Crops of one size from PIL images."""

import math

from numpy.random import Generator
from PIL import Image

_ATTEMPTS = 10  # draws of a crop that lies inside the image


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
