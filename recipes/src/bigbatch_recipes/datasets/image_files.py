"""Images by class, in folders or in one tar a split, which are decoded and cropped on access.

    train/CLASS/NAME.JPEG    val/CLASS/NAME.JPEG    folders
    train.tar                val.tar                uncompressed, members CLASS/NAME.JPEG

The number of a class is its line in classes.tsv if that exists, else the index of its name in
sorted order. No file stays open, so workers may be started in any way. A random crop depends on
the seed, the epoch and the image's number alone: a training that resumes after a kill sees the
same crops, whatever the number of its workers and ranks.
"""

import io
import math
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.files import text_of
from bigbatch_recipes.datasets.in_memory import BatchDataset

Crop = Callable[[Image.Image, Generator], Image.Image]

_SUFFIXES = (".jpeg", ".jpg", ".png")
_BLOCK = 512  # bytes of a tar's header, and of the zeros at its end
_ATTEMPTS = 10  # draws of a crop that lies inside the image


@dataclass(frozen=True)
class Split:
    """Images and their classes."""

    root: Path  # the folder, or the tar
    # CLASS/NAME of each image, as bytes in one array: one object, not millions
    names: NDArray[numpy.bytes_]
    labels: list[int]  # number of each image's class
    spans: NDArray[numpy.int64] | None  # offset and size of each image in the tar; None in a folder

    def name(self, index: int) -> str:
        """Where an image is, for messages."""
        return str(self.root / os.fsdecode(self.names[index]))

    def read(self, index: int) -> bytes:
        """The contents of an image's file.

        Raises:
            RunError: the file is missing.
        """
        tar = self.spans is not None
        offset, size = self.spans[index].tolist() if self.spans is not None else (0, -1)
        try:
            with (self.root if tar else Path(self.name(index))).open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise RunError(
                f"{self.name(index)} cannot be read ({error}); put it back, and resume"
            ) from error


def splits_of(folder: Path, classes: int) -> tuple[Split, Split]:
    """The training and validation images of a folder."""
    table = folder / "classes.tsv"
    lines = text_of(table).splitlines() if table.is_file() else []
    class_names = [line.split("\t")[0] for line in lines if line]
    train = _read_split(folder, "train", class_names, classes)
    return train, _read_split(folder, "val", class_names, classes)


def _read_split(folder: Path, split: str, class_names: list[str], classes: int) -> Split:
    """One of the two splits; an empty list of class names is filled."""
    root, tar = folder / split, folder / f"{split}.tar"
    spans = None
    if root.is_dir():
        names = sorted(_files_in(root))
    elif tar.is_file():
        root, members = tar, list(_members_of(tar))
        names = [name for name, *_ in members]
        spans = numpy.array([span for _, *span in members], dtype=numpy.int64)
    else:
        raise RunError(
            f"{folder} has no {split} images; a folder {split}/CLASS or {split}.tar must be there"
        )
    if not names:
        raise RunError(f"{root} has no CLASS/NAME.JPEG; put each class into a folder of its own")
    image_classes = [name.partition("/")[0] for name in names]
    labels = _labels_of(image_classes, class_names, classes, root)
    return Split(root, numpy.array([os.fsencode(name) for name in names]), labels, spans)


def _files_in(folder: Path) -> Iterator[str]:
    for class_folder in filter(Path.is_dir, folder.iterdir()):
        for entry in os.scandir(class_folder):
            if entry.name.lower().endswith(_SUFFIXES):
                yield f"{class_folder.name}/{entry.name}"


def _members_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """CLASS/NAME, offset and size of the images in a tar, which must be complete.

    tarfile takes a damaged or missing header for the end; the real end is a block of zeros.
    """
    last = "its start"
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # frees the headers
                last, name = member.name, PurePosixPath(member.name)
                is_image = name.suffix.lower() in _SUFFIXES and name.parent.name
                if member.isfile() and is_image:
                    yield f"{name.parent.name}/{name.name}", member.offset_data, member.size
            end = tar.offset
        with path.open("rb") as file:
            file.seek(end)
            if file.read(_BLOCK) == bytes(_BLOCK):
                return
    except (OSError, ValueError, tarfile.TarError) as error:
        raise RunError(
            f"{path} is no whole, uncompressed tar after {last} ({error}); replace it"
        ) from error
    raise RunError(f"{path} is cut short or damaged after {last}; replace it")


def _labels_of(
    image_classes: list[str], class_names: list[str], classes: int, path: Path
) -> list[int]:
    if not class_names:
        class_names += sorted(set(image_classes))
    if len(class_names) != classes:
        raise SettingError(
            f"{path} has {len(class_names)} classes, not {classes}; set classes to that"
        )
    if unknown := sorted(set(image_classes) - set(class_names)):
        raise RunError(f"{path} has a class {unknown[0]}, which is none of those to train on")
    number_of = {name: number for number, name in enumerate(class_names)}
    return [number_of[name] for name in image_classes]


class ImageFiles(BatchDataset):
    """The images of a split, cropped to one size."""

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
        """A batch: bytes (N, 3, height, width), stored with channels last, and labels (N,)."""
        pixels = numpy.stack([self._pixels_of(int(index)) for index in indices])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), self._labels[list(indices)]

    def _pixels_of(self, index: int) -> NDArray[numpy.uint8]:
        generator = numpy.random.default_rng([self._seed, self._epoch, index])
        return numpy.asarray(self._crop(_decode(self._split, index), generator))


def _decode(split: Split, index: int) -> Image.Image:
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
    """The center of the image after its shorter side is resized; draws nothing."""
    shorter = min(image.size)
    width, height = (resize * side // shorter for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size))
