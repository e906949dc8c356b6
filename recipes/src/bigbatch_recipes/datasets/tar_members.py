"""Positions of the images inside tars, for random access.

All headers of a tar are read once. The tar must not be compressed.
"""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from bigbatch.errors import RunError

Place = tuple[int, int, int]  # index of the tar, offset and size in bytes
SUFFIXES = (".jpeg", ".jpg", ".png")
_BLOCK = 512


def in_tar(path: Path) -> tuple[list[str], list[Place]]:
    """The images CLASS/NAME.JPEG of a tar: name of the class, and place, of each.

    Raises:
        RunError: the tar is damaged, or has no such member.
    """
    class_names: list[str] = []
    places: list[Place] = []
    other_members: list[str] = []
    for member, _ in _members_of(path):
        name = PurePosixPath(member.name)
        if name.suffix.lower() in SUFFIXES and name.parent.name:
            class_names.append(name.parent.name)
            places.append((0, member.offset_data, member.size))
        elif not other_members:
            other_members.append(member.name)
    if not class_names:
        raise RunError(
            f"{path} has no member CLASS/NAME.JPEG, but "
            f"{' '.join(other_members) or 'none at all'}; pack it with a folder for each class"
        )
    return class_names, places


def in_shards(paths: Sequence[Path]) -> tuple[list[int], list[Place]]:
    """The samples KEY.jpg and KEY.cls of numbered tars: the class and the place of each.

    Raises:
        RunError: a tar is damaged, or a sample lacks one of its two members.
    Source:
        The naming of github.com/webdataset/webdataset: a key ends at the first point of the
        member's last name; other members of a key are ignored.
    """
    labels: list[int] = []
    places: list[Place] = []
    for number, path in enumerate(paths):
        samples: dict[str, tuple[list[Place], list[int]]] = {}
        for member, tar in _members_of(path):
            folder, slash, name = member.name.rpartition("/")
            key, _, suffix = name.partition(".")
            images, classes = samples.setdefault(folder + slash + key, ([], []))
            if suffix == "cls":
                classes.append(_class_in(tar, member, path))
            elif f".{suffix.lower()}" in SUFFIXES:
                images.append((number, member.offset_data, member.size))
        for key, (images, classes) in samples.items():
            if (len(images), len(classes)) != (1, 1):
                raise RunError(
                    f"{path}: {key} has {len(images)} images and {len(classes)} classes, and needs "
                    f"one {key}.jpg and one {key}.cls"
                )
            places += images
            labels += classes
    if not labels:
        raise RunError(f"{paths[0]} and the other shards are empty; replace them by good copies")
    return labels, places


def name_at(path: Path, offset: int) -> str:
    """Name of the member whose contents begin at this byte."""
    names = (member.name for member, _ in _members_of(path) if member.offset_data == offset)
    return f"{path}: {next(names)}"


def _class_in(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> int:
    file = tar.extractfile(member)
    text = file.read().decode("ascii", "replace").strip() if file else ""
    if not text.isdecimal():
        raise RunError(f"{path}: {member.name} is {text!r}, and must be the number of a class")
    return int(text)


def _members_of(path: Path) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """The files in a tar, which must be complete.

    tarfile takes a damaged or missing header for the end; the real end is a block of zeros.
    """
    last = "its start"
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # frees the headers
                last = member.name
                if member.isfile():
                    yield member, tar
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
