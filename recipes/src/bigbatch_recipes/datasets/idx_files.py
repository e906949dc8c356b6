"""IDX, the format of MNIST and similar data sets: a header, then bytes; gzip or plain."""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.files import DatasetLocation, readable
from bigbatch_recipes.datasets.in_memory import InMemoryDataset

_BYTE_TYPE = 8  # in the header


def read_images(folder: Path, origin: DatasetLocation) -> tuple[InMemoryDataset, InMemoryDataset]:
    """Training and test set of a folder with MNIST's files: images (N, 1, H, W) and labels.

    Args:
        folder: a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, and the same of
            t10k, with or without .gz.
        origin: source of the files, for messages.
    """
    return _set(folder, origin, "train"), _set(folder, origin, "t10k")


def _set(folder: Path, origin: DatasetLocation, split: str) -> InMemoryDataset:
    images = read_idx(origin.file_in(folder, f"{split}-images-idx3-ubyte"), dimensions=3)
    labels = read_idx(origin.file_in(folder, f"{split}-labels-idx1-ubyte"), dimensions=1)
    if len(images) != len(labels):
        raise RunError(
            f"{folder} has {len(images)} images and {len(labels)} labels of {split}; take both "
            "files from one place"
        )
    return InMemoryDataset(images[:, None], labels.long())


def read_idx(file: Path, dimensions: int) -> Tensor:
    """The bytes of one file, in the shape of its header.

    The header is two zeros, 8 for bytes, the number of dimensions, then each of them as four bytes,
    big-endian.

    Raises:
        RunError: the file is no IDX file of bytes.
    """
    with readable(file):
        raw = file.read_bytes()
        content = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    size = math.prod(shape)  # exact, where NumPy's product wraps at 2^64
    begins = content[:4] == bytes((0, 0, _BYTE_TYPE, dimensions))
    if not begins or size == 0 or len(content) != start + size:
        raise RunError(
            f"{file} is no IDX of bytes in {dimensions} dimensions (it begins with "
            f"{content[:4].hex()}, and has {len(content):,} bytes); fetch it again"
        )
    values = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())
