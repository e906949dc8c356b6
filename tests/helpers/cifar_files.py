"""Files in the form of CIFAR-10's, as Python 2 wrote them, with few images."""

import io
import pickle
from typing import ClassVar

from bigbatch_recipes.datasets import cifar10
from real_data import FOLDER

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


class Python2(pickle._Pickler):
    """Writes bytes as the strings of Python 2 were written."""

    def save_string(self, text):
        self.write(pickle.BINSTRING + len(text).to_bytes(4, "little") + text)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, bytes: save_string}


def dumped(content):
    """As Python 2 wrote it, with the names that NumPy had then."""
    file = io.BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_few(folder, train, test):
    """The first so many images of the real CIFAR-10."""
    sets = [dataset.tensors for dataset in cifar10.read(FOLDER / "cifar10")]
    parts = [(sets[0], number * train // 5, (number + 1) * train // 5) for number in range(5)]
    parts.append((sets[1], 0, test))
    for name, ((images, labels), start, end) in zip(NAMES, parts, strict=True):
        data = images[start:end].flatten(1).numpy()
        content = {b"data": data, b"labels": labels[start:end].tolist()}
        (folder / name).write_bytes(dumped(content))
