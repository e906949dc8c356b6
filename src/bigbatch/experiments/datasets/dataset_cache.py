"""The cache folder for packed data; nothing is written next to the data, which may be shared."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/bigbatch, or ~/.cache/bigbatch where that names no absolute path.

    Raises:
        OSError: the user has no home.
    Source:
        XDG Base Directory Specification 0.8.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (folder if folder.is_absolute() else Path.home() / ".cache") / "bigbatch"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def cache_file(layout: str, file: Path) -> Path:
    """The path in the cache folder for the packed form of a file; creates the folder.

    One absolute path of a file and one layout have one cache file; the caller replaces outdated
    contents.

    Args:
        layout: layout of the packed form, which another version of bigbatch may change.
        file: a file of the user's data.
    Raises:
        OSError: the folder cannot be created or written.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{layout}\0".encode() + os.fsencode(file.resolve())).hexdigest()[:16]
    return folder / f"{file.name}-{key}.packed"
