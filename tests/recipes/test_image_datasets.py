"""Readers of CIFAR-10's pickles and of IDX: small files in their forms, and the real ones."""

import gzip
import shutil

import numpy as np
import pytest
import torch

from bigbatch.errors import RunError
from bigbatch_recipes.datasets import cifar10
from bigbatch_recipes.datasets.idx_files import read_images
from bigbatch_recipes.datasets.locations import CIFAR10
from bigbatch_recipes.recipe_registry import RECIPES
from cifar_files import NAMES, dumped
from real_data import FOLDER, needs


def batch(start, samples=2, **others):
    """What one file of CIFAR-10 holds; the bytes count on from `start`."""
    data = np.arange(start, start + samples * 3072).astype(np.uint8).reshape(samples, 3072)
    labels = [(start + number) % 10 for number in range(samples)]
    return {b"data": data, b"labels": labels, **others}


@pytest.fixture
def cifar(tmp_path):
    for number, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(dumped(batch(number)))
    return tmp_path


def test_images_of_cifar_are_planes_of_red_green_and_blue_in_the_order_of_the_files(cifar):
    train, test = cifar10.read(cifar)
    images, labels = train.tensors
    assert (10, 3, 32, 32) == images.shape
    assert (2, torch.uint8, torch.int64) == (len(test), images.dtype, labels.dtype)
    assert [0, 1, 1, 2, 2, 3, 3, 4, 4, 5] == labels.tolist()
    of_third = torch.arange(2, 2 + 2 * 3072).to(torch.uint8).reshape(2, 3, 32, 32)
    assert torch.equal(of_third, images[4:6])


class Danger:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (dumped(batch(0, other=Danger())), "it asks for .*print, which is refused"),
        (dumped(batch(0))[:500], "is no batch of CIFAR-10"),
        (dumped({b"data": 1}), "KeyError"),
        (dumped([1, 2]), "TypeError"),
        (dumped(batch(0) | {b"labels": [1, 2, 3]}), "and 3 labels"),
        (dumped(batch(0) | {b"labels": [1, 10]}), "labels from 1 to 10"),
        (dumped(batch(0) | {b"data": np.zeros((2, 3072), np.float32)}), "data of float32"),
        (b"", "EOFError"),
    ],
)
def test_a_file_that_is_no_batch_of_cifar_is_one_error(cifar, capsys, content, said):
    (cifar / "data_batch_3").write_bytes(content)
    with pytest.raises(RunError, match=said) as raised:
        cifar10.read(cifar)
    assert "data_batch_3" in str(raised.value)
    assert "unpack it again" in str(raised.value)
    assert "" == capsys.readouterr().out


def test_a_batch_of_cifar_that_is_missing_is_named(cifar):
    (cifar / "data_batch_4").unlink()
    with pytest.raises(
        RunError, match=r"data_batch_4 is missing; needed are .*, and test_batch of"
    ):
        cifar10.read(cifar)


def moments(images):
    """Mean and standard deviation of bytes, in [0, 1]."""
    share = images.flatten().bincount(minlength=256).double() / images.numel()
    values = torch.arange(256) / 255
    mean = float(share @ values.double())
    return mean, float(share @ (values - mean).double() ** 2) ** 0.5


@needs("cifar10")
def test_the_real_cifar_has_5000_images_of_each_class_and_the_mean_we_take_off():
    train, test = cifar10.read(FOLDER / "cifar10")
    assert [5000] * 10 == train.tensors[1].bincount().tolist()
    assert [1000] * 10 == test.tensors[1].bincount().tolist()
    means, deviations = zip(
        *(moments(train.tensors[0][:, plane]) for plane in range(3)), strict=True
    )
    assert pytest.approx(cifar10.MEAN, abs=5e-5) == means
    assert pytest.approx(cifar10.STD, abs=5e-5) == deviations


def idx_of(values):
    """Bytes in IDX."""
    header = bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return header + values.astype(np.uint8).tobytes()


@pytest.fixture(params=["", ".gz"])
def mnist(tmp_path, request):
    """A folder in MNIST's form, plain and by gzip: three images to train on, two to test."""
    for part, samples in (("train", 3), ("t10k", 2)):
        images = np.arange(samples * 20).reshape(samples, 4, 5)
        for name, values in (("images-idx3", images), ("labels-idx1", np.arange(samples))):
            raw = idx_of(values)
            file = tmp_path / f"{part}-{name}-ubyte{request.param}"
            file.write_bytes(gzip.compress(raw) if request.param else raw)
    return tmp_path


def test_images_of_idx_have_one_channel(mnist):
    train, test = read_images(mnist, FASHION)
    assert (3, 1, 4, 5) == train.tensors[0].shape
    assert torch.equal(torch.arange(40).to(torch.uint8).reshape(2, 1, 4, 5), test.tensors[0])
    assert ([0, 1, 2], torch.int64) == (train.tensors[1].tolist(), train.tensors[1].dtype)


FASHION = RECIPES["fashion-mnist"].origin
IMAGES = np.zeros((3, 4, 5))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (idx_of(np.zeros(60)), "is no IDX of bytes in 3 dimensions .it begins with 00000801"),
        (idx_of(IMAGES)[:-1], "and has 75 bytes"),
        (idx_of(IMAGES) + b"0", "and has 77 bytes"),
        (b"", "and has 0 bytes"),
        (bytes((0, 0, 8, 3)) + b"\x80\0\0\0" * 2 + b"\0\0\0\4", "and has 16 bytes"),
        (idx_of(IMAGES[:, :0]), "and has 16 bytes"),
        (
            gzip.compress(idx_of(IMAGES), mtime=0)[:-9],
            "cannot be read .EOFError: .*; fetch it again",
        ),
        (idx_of(np.zeros((2, 4, 5))), "has 2 images and 3 labels of train"),
    ],
    ids=[
        "dimensions",
        "one byte short",
        "one byte more",
        "empty",
        "wraps",
        "no pixel",
        "cut off",
        "other length",
    ],
)
def test_a_file_that_is_no_idx_is_one_error(mnist, content, said):
    for file in mnist.glob("train-images*"):
        file.write_bytes(content)
    with pytest.raises(RunError, match=said):
        read_images(mnist, FASHION)


def test_a_file_of_idx_that_is_missing_is_named(mnist):
    for file in mnist.glob("t10k-labels*"):
        file.unlink()
    with pytest.raises(RunError, match=r"t10k-labels-idx1-ubyte is missing; .* of Zalando"):
        read_images(mnist, FASHION)


@needs("fashion-mnist")
def test_the_real_fashion_mnist_has_6000_images_of_each_class():
    train, test = read_images(FOLDER / "fashion-mnist", FASHION)
    assert (60_000, 1, 28, 28) == train.tensors[0].shape
    assert [6000] * 10 == train.tensors[1].bincount().tolist()
    assert [1000] * 10 == test.tensors[1].bincount().tolist()
    recipe = RECIPES["fashion-mnist"]
    network = recipe.model(recipe.settings())
    expected = (network.mean.item() / 255, network.std.item() / 255)
    assert pytest.approx(expected, abs=5e-5) == moments(train.tensors[0])


@pytest.mark.parametrize(
    ("recipe", "files", "source"),
    [
        ("cifar10-resnet18", ["data_batch_1", "to data_batch_5", "test_batch"], "cs.toronto.edu"),
        (
            "fashion-mnist",
            [f"{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1")]
            + [f"{part}-ubyte.gz" for part in ("t10k-images-idx3", "t10k-labels-idx1")],
            "github.com/zalandoresearch/fashion-mnist",
        ),
    ],
)
def test_without_data_one_line_says_which_files_are_needed(
    bigbatch, tmp_path, recipe, files, source
):
    status, _, said = bigbatch("train", recipe, "--data", tmp_path, "--arm", "simigrad")
    assert 2 == status
    assert 1 == len(said.splitlines())
    assert [] == [one for one in (*files, source) if one not in said]
    assert "name the place by --data" in said


def test_a_folder_above_that_of_the_data_does_too(cifar, tmp_path_factory):
    above = tmp_path_factory.mktemp("above")
    shutil.copytree(cifar, above / "cifar-10-batches-py")
    assert above / "cifar-10-batches-py" == CIFAR10.find(above)
