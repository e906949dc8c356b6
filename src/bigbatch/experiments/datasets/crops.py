"""Parts of an image that are of one size, on PIL."""

import math

from numpy.random import Generator
from PIL import Image

_TRIES = 10  # to find a part inside the image


def part_of(
    image: Image.Image, random: Generator, *, size: int, smallest: float = 0.08
) -> Image.Image:
    """A random part of random proportions, made `size` wide and high, mirrored half of the time.

    Args:
        image: of any size.
        random: draws the part.
        size: in pixels.
        smallest: share of the image's area that is taken at least.
    Source:
        The training crops of Szegedy et al. 2014 (arXiv 1409.4842), section 6: 8 to 100 % of the
        area, sides 3:4 to 4:3; the middle where ten draws do not fit.
    """
    cut = image.crop(_drawn_part(image.width, image.height, random, smallest))
    cut = cut.resize((size, size), Image.Resampling.BILINEAR)
    mirrored = random.random() < 0.5
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut


def _drawn_part(
    width: int, height: int, random: Generator, smallest: float
) -> tuple[int, int, int, int]:
    """Left, top, right and bottom."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(smallest, 1.0)
        sides = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * sides)), round(math.sqrt(area / sides))
        if 0 < wide <= width and 0 < high <= height:
            left = int(random.integers(width - wide + 1))
            top = int(random.integers(height - high + 1))
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def middle_of(image: Image.Image, _: Generator, *, resize: int, size: int) -> Image.Image:
    """The middle of the image once its shorter side has `resize` pixels; draws nothing.

    Args:
        image: of any size.
        resize: pixels of the shorter side.
        size: pixels that are cut out of both.
    """
    shorter = min(image.size)
    width, height = (resize * side // shorter for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return scaled.crop((left, top, left + size, top + size))
