"""A working folder of a program's own: it finds its files there, and changes none of the user's."""

import errno
import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bigbatch.log.atomic_files import locked_file

_LEVELS = 3  # folders that a program has: its own and two above it
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_ENTRIES = {  # audit events that change entries of folders: which arguments are paths, and a dir_fd
    "os.link": ((1,), 3),
    "os.remove": ((0,), 1),
    "os.rename": ((0, 1), 2),
    "os.rmdir": ((0,), 1),
    "os.symlink": ((1,), 2),
}
_FOLDERS = {  # those after which a folder may be written to, or what is in it
    "os.chdir": ((0,), None),
    "os.mkdir": ((0,), 2),
    "shutil.rmtree": ((0,), 1),
}
_FILES = {  # those that change a file
    "os.chmod": ((0,), 2),
    "os.truncate": ((0,), None),
    "os.utime": ((0,), 3),
    "sqlite3.connect": ((0,), None),
}
_EVENTS = _ENTRIES | _FOLDERS | _FILES


class OwnFolder:
    """A folder of links to the entries of the user's, each of which becomes a copy when needed.

    From `enter` on, until the process ends, an audit hook of Python sees what is about to be
    written, and puts a file of the folder's own in place of a link. A write to the user's folder by
    another path is refused. Temporary files and hidden folders of the home folder (caches) are left
    to the program. Not seen is what C or Rust code writes, other than `torch.save` and safetensors,
    and what other programs write that this one starts.

    Two folders above it have links likewise, so that the program finds ../data. All ranks of a
    program have one folder: one of them at a time turns a link into what it becomes.

    Args:
        root: a new folder, for this one and those above it.
        users: the folder that the program would run in.
    """

    def __init__(self, root: Path, users: Path) -> None:
        self._root, self._users = root.resolve(), users.resolve()
        self.path = self._root.joinpath(*self._users.parts[1:][-_LEVELS:])
        self._lock, self._prepares = threading.RLock(), False
        self._free = [Path(tempfile.gettempdir()), Path("/dev"), *Path.home().glob(".*")]

    def make(self) -> None:
        """Makes the folder, and those above it."""
        self._fill(self.path, self._users)
        for path, users in zip(self.path.parents, self._users.parents, strict=False):
            if path.is_relative_to(self._root):
                with suppress(PermissionError):
                    self._link(path, users)

    def enter(self) -> None:
        """Makes it the working folder of this process."""
        os.chdir(self.path)
        sys.dont_write_bytecode = True
        _announce_writes()
        sys.addaudithook(self._before)

    def own(self, script: Path) -> Path:
        """A copy of the user's script in this folder; the script itself if it is elsewhere.

        A program that looks for files next to its script then stays in the folder.
        """
        script = script.resolve()
        if not script.is_relative_to(self._users):
            return script
        place = self.path / script.relative_to(self._users)
        with locked_file(self._root / ".lock"):
            self._own_file(place, keeps=True)
        return place

    def _before(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        if event == "open":
            name, _, flags = arguments
            if flags and flags & _WRITING:
                self._prepare(event, name, keeps=not flags & os.O_TRUNC)
        elif event in _EVENTS:
            places, dir_fd = _EVENTS[event]
            if dir_fd is None or arguments[dir_fd] in (-1, None):  # else shutil.rmtree's
                for place in places:
                    self._prepare(event, arguments[place], keeps=True)

    def _prepare(self, event: str, name: Any, *, keeps: bool) -> None:
        """Makes sure that an event changes nothing of the user's."""
        if not isinstance(name, str | bytes | os.PathLike):
            return  # a file descriptor
        with self._lock:
            if self._prepares:
                return  # what this itself does
            self._prepares = True
            try:
                path = Path(os.path.abspath(os.fsdecode(name)))  # noqa: PTH100  # links stay
                if not path.is_relative_to(self.path):
                    self._require_free(path, event)
                    return
                with locked_file(self._root / ".lock"):
                    if event in _FOLDERS:
                        self._own_folder(path)
                    elif event in _ENTRIES:
                        self._own_folder(path.parent)
                    else:
                        self._own_file(path, keeps=keeps)
            finally:
                self._prepares = False

    def _require_free(self, path: Path, event: str) -> None:
        """Raises PermissionError for a place that is not the program's."""
        place = path.parent.resolve() / path.name
        is_users = place.is_relative_to(self._users)
        folders = [x for x in self._free if not (is_users and self._users.is_relative_to(x))]
        is_free = any(place.is_relative_to(folder) for folder in folders)
        if event != "os.chdir" and not is_free:
            text = "a trial of bigbatch advise writes to its own working folder alone"
            raise PermissionError(errno.EACCES, text, str(path))

    def _own_folder(self, path: Path) -> None:
        """Turns links on the way to a folder, and itself, into folders of links."""
        if path == self.path:
            return
        self._own_folder(path.parent)
        if path.is_symlink() and path.is_dir():
            with tempfile.TemporaryDirectory(dir=self._root) as new:
                self._fill(Path(new, path.name), path.resolve())
                path.unlink()
                Path(new, path.name).rename(path)

    def _own_file(self, path: Path, *, keeps: bool) -> None:
        """Turns a link to a file into a copy, or removes it."""
        self._own_folder(path.parent)
        if path.is_symlink() and not path.is_dir():
            if keeps and path.exists():
                with tempfile.TemporaryDirectory(dir=self._root) as new:
                    Path(shutil.copy2(path, new)).replace(path)
            else:
                path.unlink()

    def _fill(self, path: Path, users: Path) -> None:
        """Makes a folder of links to the entries of one of the user's."""
        path.mkdir(parents=True)
        self._link(path, users)

    def _link(self, path: Path, users: Path) -> None:
        """Fills a folder with links to the entries of one of the user's."""
        for entry in users.iterdir():
            if not any(one.is_relative_to(entry) for one in (self.path, self._users)):
                (path / entry.name).symlink_to(entry)


def _announce_writes() -> None:
    """Lets the audit hook see the files that compiled code of torch and safetensors writes."""
    torch.save = torch.serialization.save = _announced(torch.save, 1)
    with suppress(ImportError):  # it is not installed
        safetensors: Any = import_module("safetensors")
        safetensors.serialize_file = _announced(safetensors.serialize_file, 1)


def _announced(save: Any, place: int) -> Any:
    def announced(*args: Any, **kwargs: Any) -> Any:
        name = args[place] if len(args) > place else kwargs.get("f", kwargs.get("filename"))
        if isinstance(name, str | os.PathLike):
            sys.audit("open", os.fspath(name), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return save(*args, **kwargs)

    return announced
