"""`bigbatch results`: one line for what is wrong, and logs and pages where they are expected."""

import json

import pytest

from studies.results.questions import TRAINED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "speed"], "question 'speed' is unknown; choose one of: batch-mlp"),
        (["train"], "Missing argument 'name'"),
        (["train", "batch-mlp", "--data", "nowhere"], "--data"),
        (["train", "batch-mlp", "--jobs", "0"], "--jobs"),
        (["draw"], "there is no log in docs/results; `bigbatch results train` writes one"),
        (["walk"], "No such command 'walk'"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_writes_nothing(
    bigbatch, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch("results", *arguments)
    assert (2, "") == (status, out)
    assert message in err
    assert 1 == err.count("\n")
    assert [] == list(tmp_path.iterdir())


def test_help_lists_every_question(bigbatch):
    status, out, _ = bigbatch("results", "train", "--help")
    assert 0 == status
    text = "".join(out.split())
    assert [] == [name for name in TRAINED if name not in text]


def test_a_damaged_log_is_named(bigbatch, tmp_path):
    (tmp_path / "batch-mlp.json").write_text(json.dumps({"runs": []}))
    status, _, err = bigbatch("results", "draw", "--logs", tmp_path)
    assert 2 == status
    assert "batch-mlp.json is not the log of a comparison" in err
    assert 1 == err.count("\n")
