"""CIFAR-10 in the published version for Python: one pickle for 10,000 images."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.in_memory import InMemoryDataset
from bigbatch_recipes.datasets.locations import CIFAR10

CLASSES = 10
# of the training images' channels, red, green, blue
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

_SHAPE = (3, 32, 32)
_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]


def read(folder: Path) -> tuple[InMemoryDataset, InMemoryDataset]:
    """Training and test set: images (N, 3, 32, 32) of bytes, and labels."""
    return _read([folder / name for name in _TRAIN]), _read([folder / "test_batch"])


def _read(files: Sequence[Path]) -> InMemoryDataset:
    images, labels = zip(*(_batch(file) for file in files), strict=True)
    stacked = torch.from_numpy(np.concatenate(images)).view(-1, *_SHAPE)
    return InMemoryDataset(stacked, torch.tensor(np.concatenate(labels)))


def _batch(file: Path) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
    try:
        with file.open("rb") as stream:
            content = _NumpyUnpickler(stream, encoding="bytes").load()
        images, labels = content[b"data"], np.array(content[b"labels"], dtype=np.int64)
        if images.dtype != np.uint8 or images.shape != (len(labels), int(np.prod(_SHAPE))):
            raise ValueError(f"data of {images.dtype} {images.shape}, and {len(labels)} labels")
        if labels.min(initial=0) < 0 or labels.max(initial=0) >= CLASSES:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    except FileNotFoundError:
        raise CIFAR10.missing_file(file) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise RunError(
            f"{file} is no batch of CIFAR-10 ({type(error).__name__}: {error}); unpack it again "
            f"from {CIFAR10.source}"
        ) from None
    return images, labels


class _NumpyUnpickler(pickle.Unpickler):
    """Loads NumPy arrays and nothing else, since a pickle may call any function."""

    def find_class(self, module: str, name: str) -> Any:
        """The function of this name, if arrays need it."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return _ALLOWED[module, name]


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}
