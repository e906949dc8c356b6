"""States on disk with a digest of their bytes, so that changed files are refused.

    the file of torch.save | "bigbatch sha256" and a newline | SHA-256 of the file of torch.save

The file is written in one pass, and `torch.load` reads it as any other.
"""

import hashlib
import io
import os
from typing import IO, Any, BinaryIO, cast

import torch

from bigbatch.errors import StateError

_MARK = b"bigbatch sha256\n"
_END_LENGTH = len(_MARK) + hashlib.sha256().digest_size
_CHUNK = 1 << 20  # bytes read at once


class _Hashed(io.RawIOBase):
    """Writes to a file and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)


def save_state(state: Any, file: BinaryIO) -> None:
    """Writes a state and its digest at the start of an empty file."""
    hashed = _Hashed(file)
    torch.save(state, cast("IO[bytes]", hashed))  # which has write and flush
    file.write(_MARK + hashed.digest.digest())


def load_state(file: BinaryIO, name: str) -> Any:
    """Loads a state from `save_state` to the CPU; checks the digest before it unpickles.

    Raises:
        StateError: the bytes have changed, or have no digest.
    """
    length = file.seek(0, os.SEEK_END) - _END_LENGTH
    file.seek(max(length, 0))
    end = file.read()
    if length <= 0 or not end.startswith(_MARK):
        raise StateError(
            f"{name} does not end with a digest: it is cut short, of an earlier version, or no "
            "state that bigbatch saved"
        )
    if end != _MARK + _digest_of(file, length):
        raise StateError(f"{name} is damaged: its SHA-256 is not the one that was saved with it")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _digest_of(file: BinaryIO, length: int) -> bytes:
    """SHA-256 of so many bytes from the start."""
    digest = hashlib.sha256()
    file.seek(0)
    while length > 0 and (data := file.read(min(_CHUNK, length))):
        digest.update(data)
        length -= len(data)
    return digest.digest()
