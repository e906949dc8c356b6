"""Where the images inside tars lie, so that any of them can be read at once.

A tar is read through once, header by header. It must be a plain one, not compressed.
"""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from bigbatch.errors import RunError

Place = tuple[int, int, int]  # which of the tars, first byte, bytes
SUFFIXES = (".jpeg", ".jpg", ".png")
_BLOCK = 512


def in_tar(path: Path) -> tuple[list[str], list[Place]]:
    """The images CLASS/NAME.JPEG of a tar: the class of each by name, and its place.

    Raises:
        RunError: the tar is damaged, or has no such member.
    """
    named: list[str] = []
    places: list[Place] = []
    others: list[str] = []
    for member, _ in _members_of(path):
        name = PurePosixPath(member.name)
        if name.suffix.lower() in SUFFIXES and name.parent.name:
            named.append(name.parent.name)
            places.append((0, member.offset_data, member.size))
        elif not others:
            others.append(member.name)
    if not named:
        raise RunError(
            f"{path} has no member CLASS/NAME.JPEG, but {' '.join(others) or 'none at all'}; pack "
            "it with a folder for each class"
        )
    return named, places


def in_shards(paths: Sequence[Path]) -> tuple[list[int], list[Place]]:
    """The samples KEY.jpg and KEY.cls of numbered tars: the class and the place of each.

    Raises:
        RunError: a tar is damaged, or a sample lacks one of its two members.
    Source:
        The naming of github.com/webdataset/webdataset: a key ends at the first point of the
        member's last name; other members of a key are of no concern.
    """
    labels: list[int] = []
    places: list[Place] = []
    for number, path in enumerate(paths):
        found: dict[str, tuple[list[Place], list[int]]] = {}
        for member, tar in _members_of(path):
            before, slash, name = member.name.rpartition("/")
            key, _, suffix = name.partition(".")
            place, label = found.setdefault(before + slash + key, ([], []))
            if suffix == "cls":
                label.append(_class_in(tar, member, path))
            elif f".{suffix.lower()}" in SUFFIXES:
                place.append((number, member.offset_data, member.size))
        for key, (place, label) in found.items():
            if (len(place), len(label)) != (1, 1):
                raise RunError(
                    f"{path}: {key} has {len(place)} images and {len(label)} classes, and needs "
                    f"one {key}.jpg and one {key}.cls"
                )
            places += place
            labels += label
    if not labels:
        raise RunError(f"{paths[0]} and its likes are empty; replace them by good copies")
    return labels, places


def name_at(path: Path, first: int) -> str:
    """What the member is called whose contents begin at this byte."""
    names = (member.name for member, _ in _members_of(path) if member.offset_data == first)
    return f"{path}: {next(names)}"


def _class_in(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> int:
    file = tar.extractfile(member)
    text = file.read().decode("ascii", "replace").strip() if file else ""
    if not text.isdecimal():
        raise RunError(f"{path}: {member.name} is {text!r}, and must be the number of a class")
    return int(text)


def _members_of(path: Path) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """The files in a tar, which has to be whole.

    Where a header is damaged or missing, tarfile takes it for the end; a true end is a block of
    zeros.
    """
    last = "its start"
    try:
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else a million headers stay
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
