"""Where what is made of a user's data is kept: never next to the data, which may be others' too."""

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
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "bigbatch"
    except RuntimeError as error:
        raise OSError(str(error)) from None


def cached(layout: str, file: Path) -> Path:
    """The place in the cache folder, which is made, of what is made of a file.

    One absolute path of a file and one layout have one place: what is there of an earlier content
    is to be replaced.

    Args:
        layout: of what is made, so that another version's is not taken for it.
        file: of the user's data.
    Raises:
        OSError: the folder cannot be made or written.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{layout}\0".encode() + os.fsencode(file.resolve())).hexdigest()[:16]
    return folder / f"{file.name}-{key}.packed"
