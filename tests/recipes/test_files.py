"""Published files that are damaged: whichever reader finds one says so in one line, by its name."""

import gzip

import numpy
import pytest

from bigbatch.errors import RunError
from bigbatch_recipes.datasets.click_log import read_clicks
from bigbatch_recipes.datasets.files import text_of
from bigbatch_recipes.datasets.idx_files import read_images
from bigbatch_recipes.datasets.squad_questions import read_questions
from bigbatch_recipes.datasets.text import corpus_of
from bigbatch_recipes.recipe_registry import RECIPES

CONTENT = numpy.random.default_rng(0).integers(97, 123, 20_000, dtype=numpy.uint8).tobytes()
WHOLE = gzip.compress(CONTENT, mtime=0)
READERS = {
    "text.txt.gz": lambda file: list(corpus_of(file.parent).train()),
    "dev-v1.1.json.gz": read_questions,
    "train-images-idx3-ubyte.gz": lambda file: read_images(
        file.parent, RECIPES["fashion-mnist"].origin
    ),
    "train.txt.gz": lambda file: list(read_clicks(file)),
}
DAMAGES = {
    "cut": WHOLE[:-2_000],
    "flipped in the middle": WHOLE[:6_000]
    + bytes(b ^ 0xFF for b in WHOLE[6_000:6_100])
    + WHOLE[6_100:],
    "another checksum": WHOLE[:-8] + b"\0" * 4 + WHOLE[-4:],
    "a page that says it is not there": b"<html><body>404 Not Found</body></html>",
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_with_its_name(tmp_path, name, damage):
    (tmp_path / name).write_bytes(DAMAGES[damage])
    with pytest.raises(RunError, match=name) as raised:
        READERS[name](tmp_path / name)
    assert "\n" not in str(raised.value)
    assert "fetch it" in str(raised.value) or "needed are 40 columns" in str(raised.value)


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa")
    assert "a" == text_of(tmp_path / "a.txt")
