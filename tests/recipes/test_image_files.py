"""Images by class: two layouts, one reading; what is damaged is named."""

import io
import pickle
import tarfile
from functools import partial

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.image_files import (
    ImageFiles,
    random_resized_crop,
    resize_and_center_crop,
    splits_of,
)
from bigbatch_recipes.datasets.in_memory import identity_collate
from real_data import FOLDER, needs

WHOLE = partial(resize_and_center_crop, resize=8, size=8)
PART = partial(random_resized_crop, size=8)
CLASSES = ("n02", "n01")  # neither in order nor numbered so
TABLE = "n02\tcat\nn01\tdog\n"


def jpeg(shade, mode="RGB"):
    """An image of one shade of grey."""
    file = io.BytesIO()
    Image.new(mode, (10, 8), shade if mode == "L" else (shade,) * 3).save(file, "JPEG")
    return file.getvalue()


def images_of(split):
    """Two of each class; the shade says which is which."""
    add = {"train": 0, "val": 100}[split]
    return {
        f"{name}/{number}.JPEG": jpeg(add + 10 * at + 40 * number, "L" if number else "RGB")
        for at, name in enumerate(CLASSES)
        for number in range(2)
    }


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def in_folders(folder, split):
    for name, data in images_of(split).items():
        place = folder / split / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def in_one_tar(folder, split):
    write_tar(folder / f"{split}.tar", images_of(split))


LAYOUTS = [in_folders, in_one_tar]


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path):
    """Two classes in one of the layouts."""
    for split in ("train", "val"):
        request.param(tmp_path, split)
    (tmp_path / "classes.tsv").write_text(TABLE)
    return tmp_path


def shades_of(split):
    """The mean of each image, with its class."""
    images, labels = ImageFiles(split, WHOLE).__getitems__(range(len(split.labels)))
    assert (torch.uint8, (3, 8, 8)) == (images.dtype, images.shape[1:])
    shades = images.float().mean((1, 2, 3)).round().int().tolist()
    return sorted(zip(shades, labels.tolist(), strict=True))


def test_every_layout_gives_the_same_images_with_the_same_classes(folder):
    train, val = splits_of(folder, 2)
    assert [(0, 0), (10, 1), (40, 0), (50, 1)] == shades_of(train)
    assert [(100, 0), (110, 1), (140, 0), (150, 1)] == shades_of(val)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_table_classes_are_numbered_in_the_order_of_their_names(tmp_path, layout):
    for split in ("train", "val"):
        layout(tmp_path, split)
    train, _ = splits_of(tmp_path, 2)
    assert [(0, 1), (10, 0), (40, 1), (50, 0)] == shades_of(train)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_workers_cut_what_one_process_cuts(tmp_path, context):
    for split in ("train", "val"):
        in_one_tar(tmp_path, split)
    data = ImageFiles(splits_of(tmp_path, 2)[0], PART, seed=3)
    data.set_epoch(2)
    expected = data.__getitems__(range(4))
    loader = DataLoader(
        data, 1, collate_fn=identity_collate, num_workers=2, multiprocessing_context=context
    )
    loaded = [torch.cat(column) for column in zip(*loader, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(expected, loaded, strict=True))


def test_a_data_set_is_pickled_without_its_images(folder):
    data = ImageFiles(splits_of(folder, 2)[0], PART)
    copied = pickle.loads(pickle.dumps(data))
    assert torch.equal(data[1][0], copied[1][0])


def test_each_epoch_and_seed_has_crops_of_its_own_and_draws_from_no_other_generator(tmp_path):
    for split in ("train", "val"):
        path = tmp_path / split / "n01" / "0.png"
        path.parent.mkdir(parents=True)
        pixels = numpy.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(path)
    split, _ = splits_of(tmp_path, 1)
    before = torch.get_rng_state()
    found = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        data = ImageFiles(split, PART, seed)
        data.set_epoch(epoch)
        found.append(data[0][0])
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(before, torch.get_rng_state())


# crops


def test_a_part_has_the_area_and_the_proportions_asked_for_and_all_places_come():
    width, height = 60, 40
    across, down = numpy.meshgrid(numpy.arange(width), numpy.arange(height))
    image = Image.fromarray(numpy.stack([across, down, 0 * down], -1).astype(numpy.uint8))
    random = numpy.random.default_rng(0)
    areas, mirrored, lefts = [], 0, []
    for _ in range(400):
        cut = numpy.asarray(random_resized_crop(image, random, size=50, min_area=0.25)).astype(int)
        first, last = cut[0, 0], cut[-1, -1]
        wide, high = abs(last[0] - first[0]) + 1, last[1] - first[1] + 1
        assert 0.6 < wide / high < 1.6  # 3:4 to 4:3, and what rounding does to few pixels
        areas.append(wide * high / (width * height))
        mirrored += bool(first[0] > last[0])
        lefts.append(min(first[0], last[0]))
    assert 0.2 < min(areas) < 0.3
    assert 0.7 < max(areas)
    assert 150 < mirrored < 250  # of 400, an eighth of the deviations away from 200
    assert 0 == min(lefts)
    assert 20 < max(lefts)


def test_an_image_that_no_part_fits_gives_its_middle():
    image = Image.new("RGB", (400, 2))
    image.paste((255, 0, 0), (199, 0, 202, 2))
    cut = numpy.asarray(
        random_resized_crop(image, numpy.random.default_rng(0), size=4, min_area=1.0)
    )
    assert 255 == cut[..., 0].max()


@pytest.mark.parametrize(("size", "scaled"), [((60, 40), (48, 32)), ((40, 60), (32, 48))])
def test_the_middle_is_that_of_the_scaled_image(size, scaled):
    pixels = numpy.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=numpy.uint8)
    image = Image.fromarray(pixels)
    whole = numpy.asarray(image.resize(scaled, Image.Resampling.BILINEAR))
    left, top = (scaled[0] - 24) // 2, (scaled[1] - 24) // 2
    cut = resize_and_center_crop(image, numpy.random.default_rng(0), resize=32, size=24)
    assert (whole[top : top + 24, left : left + 24] == numpy.asarray(cut)).all()


# what is damaged or missing


def test_a_damaged_image_is_named(folder):
    for path in folder.rglob("*"):
        good = path.read_bytes() if path.is_file() else b""
        start = good.find(b"\xff\xd8\xff")  # of a JPEG
        if start >= 0:
            path.write_bytes(good[: start + 2] + b"\0" * 200 + good[start + 202 :])
    data = ImageFiles(splits_of(folder, 2)[0], WHOLE)
    with pytest.raises(RunError, match=r"(n0\d/0\.JPEG|part\.1/000\.jpg) is damaged"):
        data[0]


def test_an_image_that_is_cut_short_is_named(tmp_path):
    for split in ("train", "val"):
        in_folders(tmp_path, split)
    path = tmp_path / "train" / "n01" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"n01/1\.JPEG is damaged"):
        ImageFiles(splits_of(tmp_path, 2)[0], WHOLE)[1]


@pytest.mark.parametrize("kept", [300, 512, 900, 1024, 2000])
def test_a_tar_that_is_cut_short_is_found_out(tmp_path, kept):
    in_one_tar(tmp_path, "train")
    path = tmp_path / "train.tar"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RunError, match=r"train\.tar is (no whole|cut short)"):
        splits_of(tmp_path, 2)


def test_a_tar_with_a_damaged_header_is_no_shorter_data_set(tmp_path):
    in_one_tar(tmp_path, "train")
    path = tmp_path / "train.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"n02/1.JPEG")] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=r"train\.tar is cut short or damaged after n02/0\.JPEG"):
        splits_of(tmp_path, 2)


def test_a_compressed_tar_is_refused(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("n01/0.JPEG"))
    with pytest.raises(RunError, match="no whole, uncompressed tar after its start"):
        splits_of(tmp_path, 1)


def test_the_tar_of_tars_of_the_publisher_is_to_be_packed_again(tmp_path):
    write_tar(tmp_path / "train.tar", {"n01440764.tar": b"", "n01443537.tar": b""})
    with pytest.raises(RunError, match=r"train\.tar has no CLASS/NAME\.JPEG"):
        splits_of(tmp_path, 2)


def test_another_number_of_classes_is_refused(folder):
    with pytest.raises(SettingError, match="2 classes, not 1"):
        splits_of(folder, 1)


def test_fewer_classes_than_are_trained_on_are_refused(folder):
    with pytest.raises(SettingError, match="2 classes, not 3; set classes to that"):
        splits_of(folder, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_class_that_is_not_trained_on_is_refused(tmp_path, layout):
    for split in ("train", "val"):
        layout(tmp_path, split)
    (tmp_path / "classes.tsv").write_text("n02\nn03\n")
    with pytest.raises(RunError, match="has a class n01, which is none"):
        splits_of(tmp_path, 2)


def test_the_missing_split_is_said(tmp_path):
    in_folders(tmp_path, "train")
    with pytest.raises(RunError, match=r"has no val images; a folder val/CLASS or val\.tar"):
        splits_of(tmp_path, 2)
    (tmp_path / "val").mkdir()
    with pytest.raises(RunError, match=r"val has no CLASS/NAME\.JPEG"):
        splits_of(tmp_path, 2)


def test_an_image_that_was_removed_is_named(tmp_path):
    for split in ("train", "val"):
        in_folders(tmp_path, split)
    train, _ = splits_of(tmp_path, 2)
    (tmp_path / "train" / "n01" / "0.JPEG").unlink()
    with pytest.raises(RunError, match=r"n01/0\.JPEG cannot be read"):
        ImageFiles(train, WHOLE).__getitems__([0])


@needs("tiny-imagenet-20")
def test_the_twenty_classes_of_tiny_imagenet():
    train, val = splits_of(FOLDER / "tiny-imagenet-20", 20)
    assert [500] * 20 == torch.bincount(torch.tensor(train.labels)).tolist()
    assert [50] * 20 == torch.bincount(torch.tensor(val.labels)).tolist()
    assert "n02124075" in train.name(train.labels.index(0))  # the table's first line
    grey = 0
    for number in range(0, 1000, 20):
        with Image.open(io.BytesIO(val.read(number))) as image:
            assert (64, 64) == image.size
            grey += image.mode == "L"
    same = ImageFiles(val, partial(resize_and_center_crop, resize=64, size=64))
    with Image.open(io.BytesIO(val.read(7))) as image:
        expected = torch.tensor(numpy.asarray(image.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(expected, same[7][0])
    assert 50 > grey
