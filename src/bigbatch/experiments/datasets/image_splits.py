"""Images by class as ImageNet is stored: in folders, in one tar a split, or in numbered shards.

    train/CLASS/NAME.JPEG         val/CLASS/NAME.JPEG         folders
    train.tar                     val.tar                     members CLASS/NAME.JPEG
    PREFIXtrain-000000.tar ...    PREFIXval-000000.tar ...    members KEY.jpg and KEY.cls

The number of a class is its line in classes.tsv, where there is one, else its place among the
names in order; in shards (webdataset's) it is what KEY.cls says. No file stays open, so workers may
be started in any way.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy

from bigbatch.errors import RunError, SettingError
from bigbatch.experiments.datasets.files import text_of
from bigbatch.experiments.datasets.tar_members import SUFFIXES, Place, in_shards, in_tar, name_at

FILES = ("train/*/*", "train.tar", "*train-[0-9]*.tar")
_SHARDS = {"train": ("*train-[0-9]*.tar",), "val": ("*val-[0-9]*.tar", "*validation-[0-9]*.tar")}


class Stored(Protocol):
    """The files of images, by number."""

    def read(self, number: int) -> bytes:
        """What is in one.

        Raises:
            RunError: it is gone.
        """

    def name(self, number: int) -> str:
        """Where it is, for people."""


@dataclass(frozen=True)
class Split:
    """Images and what they show.

    Args:
        stored: the images.
        labels: the number of each one's class.
    """

    stored: Stored
    labels: Sequence[int]


def splits_of(folder: Path, classes: int) -> tuple[Split, Split]:
    """The images of a folder to train on, and those to judge by.

    Args:
        folder: with one of the three layouts.
        classes: that there must be.
    Raises:
        RunError: files are missing or damaged.
        SettingError: there is another number of classes.
    """
    table = folder / "classes.tsv"
    if table.is_file():
        known = [line.split("\t")[0] for line in text_of(table).splitlines() if line]
    else:
        known = []
    train = _split_of(folder, "train", known, classes)
    return train, _split_of(folder, "val", known, classes)


def _split_of(folder: Path, split: str, known: list[str], classes: int) -> Split:
    """One of them; `known` are the names of the classes, filled in where there are none yet."""
    inside, tar = folder / split, folder / f"{split}.tar"
    shards = sorted({path for pattern in _SHARDS[split] for path in folder.glob(pattern)})
    if inside.is_dir():
        names = _names_in(inside)
        named = [name.partition("/")[0] for name in names]
        return Split(_InFolders(inside, names), _numbered(named, known, classes, inside))
    if tar.is_file():
        named, places = in_tar(tar)
        return Split(_InTars([tar], places), _numbered(named, known, classes, tar))
    if shards:
        labels, places = in_shards(shards)
        _require_classes(labels, classes, shards[0], all_of_them=split == "train")
        return Split(_InTars(shards, places), labels)
    raise RunError(
        f"{folder} has no {split} images; a folder {split}/CLASS, {split}.tar or shards "
        f"{' or '.join(_SHARDS[split])} must be there"
    )


def _names_in(folder: Path) -> list[str]:
    """CLASS/NAME of each image, in order."""
    names = []
    for one in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        inside = sorted(entry.name for entry in os.scandir(folder / one))
        names += [f"{one}/{name}" for name in inside if name.lower().endswith(SUFFIXES)]
    if not names:
        raise RunError(f"{folder} has no CLASS/NAME.JPEG; put each class into a folder of its own")
    return names


def _numbered(named: list[str], known: list[str], classes: int, place: Path) -> list[int]:
    """The numbers of classes that are given by name."""
    if not known:
        known += sorted(set(named))
    if len(known) != classes:
        raise SettingError(f"{place} has {len(known)} classes, not {classes}; set classes to that")
    if strange := sorted(set(named) - set(known)):
        raise RunError(f"{place} has a class {strange[0]}, which is none of those to train on")
    number = {name: at for at, name in enumerate(known)}
    return [number[name] for name in named]


def _require_classes(labels: list[int], classes: int, shard: Path, *, all_of_them: bool) -> None:
    """Raises SettingError where shards have other classes than there must be."""
    if max(labels) >= classes:
        raise SettingError(
            f"class {max(labels)} is in {shard} or one of its likes, and classes={classes} has "
            "numbers below that alone; set classes to what there are"
        )
    different = len(set(labels))
    if all_of_them and different != classes:
        raise SettingError(
            f"{shard} and its likes have {different} classes, not {classes}; set classes to that, "
            "or put the shards there that are missing"
        )


class _InFolders:
    """Images that are files of their own."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = numpy.array([os.fsencode(name) for name in names])  # one object, not millions

    def name(self, number: int) -> str:
        return str(self._folder / os.fsdecode(self._names[number]))

    def read(self, number: int) -> bytes:
        try:
            return Path(self.name(number)).read_bytes()
        except OSError as error:
            raise _gone(self.name(number), error) from error


class _InTars:
    """Images inside tars."""

    def __init__(self, tars: Sequence[Path], places: Sequence[Place]) -> None:
        self._tars = tars
        self._places = numpy.array(places)

    def name(self, number: int) -> str:
        tar, first, _ = self._places[number].tolist()
        return name_at(self._tars[tar], first)

    def read(self, number: int) -> bytes:
        tar, first, size = self._places[number].tolist()
        try:
            with self._tars[tar].open("rb") as file:
                file.seek(first)
                contents: bytes = file.read(size)
                return contents
        except OSError as error:
            raise _gone(str(self._tars[tar]), error) from error


def _gone(name: str, error: OSError) -> RunError:
    return RunError(f"{name} cannot be read ({error}); put it back, and resume")
