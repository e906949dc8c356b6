"""GLUE: its files, its scores, and that a training tells classes apart."""

import io
import json
import tarfile

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.glue_tasks import TASKS, read_task
from bigbatch_recipes.glue import GLUE
from real_data import FOLDER, needs
from recipe_steps import few_steps

TINY = {"vocabulary": 300, "length": 16, "samples": 0, "epochs": 3, "micro_batch": 32}

FILES = {  # as published: quotes that open and do not close, a mark of the byte order, no header
    "SST-2": 'sentence\tlabel\na "film" of "note \t1\nbad\t0\n',
    "CoLA": "gj04\t1\t\tOne is right.\ngj04\t0\t*\tRight one is is.\n",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tA b .\tB a .\n",
    "RTE": "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n",
}
ROWS = {
    "SST-2": [(('a "film" of "note ',), 1), (("bad",), 0)],
    "CoLA": [(("One is right.",), 1), (("Right one is is.",), 0)],
    "MRPC": [(("A b .", "B a ."), 1)],
    "RTE": [(("A", "B"), 0), (("C", "D"), 1)],
}


def written(folder, name, part, text):
    (folder / name).mkdir(exist_ok=True)
    (folder / name / f"{part}.tsv").write_text(text, encoding="utf-8")


@pytest.fixture
def reviews(tmp_path):
    """Films that are good or bad, as their third word says."""
    words = [f"film{n}" for n in range(20)]
    rows = [
        (f"the {one} {two} {other} end", k)
        for one in words
        for other in words
        for two, k in (("good", 1), ("bad", 0))
    ]
    for part, some in (("train", rows[::2] + rows[1::2]), ("dev", rows[::9])):
        lines = "".join(f"{text}\t{label}\n" for text, label in some)
        written(tmp_path, "SST-2", part, "sentence\tlabel\n" + lines)
    return tmp_path


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_read_from_a_folder_and_from_the_archive(tmp_path, name):
    written(tmp_path, name, "dev", FILES[name])
    assert ROWS[name] == read_task(tmp_path, name, "dev")
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "glue.tar.gz", "w:gz") as archive:
        text = FILES[name].encode()
        member = tarfile.TarInfo(f"glue/{name}/dev.tsv")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    assert ROWS[name] == read_task(packed, name, "dev")


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SettingError, match="GLUE task 'QQP' is unknown; choose one of: SST-2,"):
        read_task(tmp_path, "QQP", "dev")
    with pytest.raises(RunError, match=r"RTE/dev.tsv is missing; .* from gluebenchmark.com"):
        read_task(tmp_path, "RTE", "dev")
    written(tmp_path, "SST-2", "dev", "sentence\tlabel\ngood\t1\nbad\t2\n")
    with pytest.raises(RunError, match=r"SST-2/dev.tsv in .*, row 1, is \['bad', '2'\]; need 2"):
        read_task(tmp_path, "SST-2", "dev")


def test_the_missing_data_are_named(bigbatch, tmp_path):
    status, _, said = bigbatch("train", "glue", "--data", tmp_path)
    assert 2 == status
    assert "GLUE is not in" in said
    assert "SST-2/train.tsv or CoLA/train.tsv or MRPC/train.tsv or RTE/train.tsv or" in said
    assert "and dev.tsv in the same folder of TASK.zip from gluebenchmark.com, unpacked" in said


@needs("glue")
@pytest.mark.parametrize(
    ("name", "train", "dev"),
    [("SST-2", 67_349, 872), ("CoLA", 8_551, 1_043), ("MRPC", 3_668, 408), ("RTE", 2_490, 277)],
)
def test_the_real_files_have_their_counts(name, train, dev):
    rows = [read_task(FOLDER / "glue", name, part) for part in ("train", "dev")]
    assert [train, dev] == [len(part) for part in rows]
    assert {0, 1} == {label for _, label in rows[1]}


class Fixed(torch.nn.Module):
    """Says 1 of rows whose second token has an odd number."""

    def forward(self, tokens, segments, real):
        odd = tokens[:, 1].long() % 2
        return torch.nn.functional.one_hot(odd, 2).float()


@pytest.mark.parametrize(
    ("name", "first", "measured"),
    [("CoLA", "Matthews correlation, %", matthews_corrcoef), ("MRPC", "F1, %", f1_score)],
)
def test_the_score_that_counts_is_the_tasks_official_one(tmp_path, name, first, measured):
    lines = [
        f"a\t{n % 3 > 0:d}\t\tw{n} x" if name == "CoLA" else f"{n % 3 > 0:d}\t1\t2\tw{n}\tx"
        for n in range(30)
    ]
    head = [] if name == "CoLA" else ["a\tb\tc\td\te"]
    for part in ("train", "dev"):
        written(tmp_path, name, part, "\n".join(head + lines) + "\n")
    settings = GLUE.settings().with_changes({**TINY, "data": str(tmp_path), "glue_task": name})
    data = GLUE.data(settings)
    *rows, wanted = data.train.__getitems__(list(range(30)))
    expected = 100 * measured(wanted, Fixed()(*rows).argmax(-1))
    scores = data.scores(Fixed())
    assert (f"{first} ({name} dev)", pytest.approx(expected)) == next(iter(scores.items()))


@pytest.mark.release
def test_a_training_tells_good_films_from_bad_ones(bigbatch, reviews):
    options = [text for name, value in TINY.items() for text in ("--set", f"{name}={value}")]
    run = reviews / "run"
    command = ["train", "glue", "--data", reviews, "--arm", "adam", "--quiet", "--run-dir", run]
    assert 0 == bigbatch(*command, *options)[0]
    *_, last = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["metrics"]["accuracy, % (SST-2 dev)"] > 80


def test_two_ranks_agree_on_weights_and_scores(ranks, reviews):
    settings = GLUE.settings().with_changes({**TINY, "data": str(reviews), "samples": 96})
    (weights, scores), (others, same) = ranks(2)(few_steps, settings)
    assert (weights, scores) == (others, same)
