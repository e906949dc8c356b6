"""Images by class as ImageNet is stored: in folders, in one tar a split, or in numbered shards.

    train/CLASS/NAME.JPEG         val/CLASS/NAME.JPEG         folders
    train.tar                     val.tar                     members CLASS/NAME.JPEG
    PREFIXtrain-000000.tar ...    PREFIXval-000000.tar ...    members KEY.jpg and KEY.cls

The number of a class is its line in classes.tsv if that exists, else the index of its name in
sorted order; in shards (webdataset's) KEY.cls contains it. No file stays open, so workers may be
started in any way.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.files import text_of
from bigbatch_recipes.datasets.tar_members import SUFFIXES, Place, in_shards, in_tar, name_at

FILES = ("train/*/*", "train.tar", "*train-[0-9]*.tar")
_SHARDS = {"train": ("*train-[0-9]*.tar",), "val": ("*val-[0-9]*.tar", "*validation-[0-9]*.tar")}


class Split(Protocol):
    """Images and their classes.

    Args:
        labels: number of each image's class.
    """

    labels: Sequence[int]

    def read(self, index: int) -> bytes:
        """The contents of an image's file.

        Raises:
            RunError: the file is missing.
        """

    def name(self, index: int) -> str:
        """Where the image is, for messages."""


def splits_of(folder: Path, classes: int) -> tuple[Split, Split]:
    """The training and validation images of a folder.

    Args:
        folder: a folder in one of the three layouts.
        classes: required number of classes.
    Raises:
        RunError: files are missing or damaged.
        SettingError: the number of classes is another one.
    """
    table = folder / "classes.tsv"
    lines = text_of(table).splitlines() if table.is_file() else []
    class_names = [line.split("\t")[0] for line in lines if line]
    train = _read_split(folder, "train", class_names, classes)
    return train, _read_split(folder, "val", class_names, classes)


def _read_split(folder: Path, split: str, class_names: list[str], classes: int) -> Split:
    """One of the two splits; an empty list of class names is filled."""
    subfolder, tar = folder / split, folder / f"{split}.tar"
    shards = sorted({path for pattern in _SHARDS[split] for path in folder.glob(pattern)})
    if subfolder.is_dir():
        files = _files_in(subfolder)
        image_classes = [file.partition("/")[0] for file in files]
        labels = _labels_of(image_classes, class_names, classes, subfolder)
        return _FolderImages(labels, subfolder, files)
    if tar.is_file():
        image_classes, places = in_tar(tar)
        return _TarImages(_labels_of(image_classes, class_names, classes, tar), [tar], places)
    if shards:
        labels, places = in_shards(shards)
        _require_classes(labels, classes, shards[0], all_of_them=split == "train")
        return _TarImages(labels, shards, places)
    raise RunError(
        f"{folder} has no {split} images; a folder {split}/CLASS, {split}.tar or shards "
        f"{' or '.join(_SHARDS[split])} must be there"
    )


def _files_in(folder: Path) -> list[str]:
    """CLASS/NAME of each image, in order."""
    files = []
    for class_name in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        names = sorted(entry.name for entry in os.scandir(folder / class_name))
        files += [f"{class_name}/{name}" for name in names if name.lower().endswith(SUFFIXES)]
    if not files:
        raise RunError(f"{folder} has no CLASS/NAME.JPEG; put each class into a folder of its own")
    return files


def _labels_of(
    image_classes: list[str], class_names: list[str], classes: int, path: Path
) -> list[int]:
    """The number of each image's class."""
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


def _require_classes(labels: list[int], classes: int, shard: Path, *, all_of_them: bool) -> None:
    """Raises SettingError where shards have other classes than the setting."""
    if max(labels) >= classes:
        raise SettingError(
            f"{shard} or another shard has class {max(labels)}, and classes={classes} allows "
            "smaller numbers only; set classes to the number of classes"
        )
    different = len(set(labels))
    if all_of_them and different != classes:
        raise SettingError(
            f"{shard} and the other shards have {different} classes, not {classes}; set classes to "
            "that, or add the missing shards"
        )


class _FolderImages:
    """Images in files of their own."""

    def __init__(self, labels: Sequence[int], folder: Path, names: Sequence[str]) -> None:
        self.labels, self._folder = labels, folder
        self._names = numpy.array([os.fsencode(name) for name in names])  # one object, not millions

    def name(self, index: int) -> str:
        return str(self._folder / os.fsdecode(self._names[index]))

    def read(self, index: int) -> bytes:
        return _read(self.name(index))


class _TarImages:
    """Images inside tars."""

    def __init__(
        self, labels: Sequence[int], tars: Sequence[Path], places: Sequence[Place]
    ) -> None:
        self.labels, self._tars, self._places = labels, tars, numpy.array(places)

    def name(self, index: int) -> str:
        tar, offset, _ = self._places[index].tolist()
        return name_at(self._tars[tar], offset)

    def read(self, index: int) -> bytes:
        tar, offset, size = self._places[index].tolist()
        return _read(str(self._tars[tar]), offset, size)


def _read(name: str, offset: int = 0, size: int = -1) -> bytes:
    try:
        with Path(name).open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise RunError(f"{name} cannot be read ({error}); put it back, and resume") from error
