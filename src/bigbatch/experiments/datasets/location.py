"""Where a data set lies, or one line on which files are needed and where they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunError

DEFAULT_FOLDER = Path("data")  # looked into where no folder is named


@dataclass(frozen=True)
class DatasetLocation:
    """A data set as its publishers lay it out.

    Args:
        name: what people call it.
        folders: names its folder has; the folder given may be it, or hold it.
        files: by which it is known, one of the patterns at least; () for what needs no files.
        source: who publishes it, and where.
        size: in words.
        otherwise: what is used where no folder is given; "" for nothing.
        other_files: what is needed too.
    """

    name: str
    folders: Sequence[str] = ()
    files: Sequence[str] = ()
    source: str = ""
    size: str = ""
    otherwise: str = ""
    other_files: Sequence[str] = ()

    def find(self, given: Path | None) -> Path | None:
        """The folder with the files, below the one that is given, or below `data`.

        Returns:
            None where none was given and there is something else to train on.
        Raises:
            RunError: it lacks the files; says which, and where they come from.
        """
        places = [given] if given is not None else [DEFAULT_FOLDER]
        for place in places:
            for folder in (place, *(place / name for name in self.folders)):
                if self.has_files_in(folder):
                    return folder.resolve()
        if given is None and self.otherwise:
            return None
        raise RunError(
            f"{self.name} is not in {given or DEFAULT_FOLDER}: {self.needed} must be there, or "
            f"in a folder {' or '.join(self.folders)} of it; name the place by --data"
        )

    @property
    def needed(self) -> str:
        """Which files, and where they come from."""
        files = " or ".join(self.files)
        return f"{', and '.join((files, *self.other_files))} of {self.source}"

    def missing_file(self, file: Path) -> RunError:
        """What to raise where one of the files is not in the folder."""
        return RunError(f"{file} is missing; needed are {self.needed}")

    def has_files_in(self, folder: Path) -> bool:
        """Whether the files are in this very folder."""
        return any(next(folder.glob(pattern), None) for pattern in self.files)
