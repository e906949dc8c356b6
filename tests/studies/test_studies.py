"""Every study runs in its tiny form, prints tables, and names its own command."""

import contextlib
import io
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import studies
from studies.markdown_tables import markdown_table, show
from studies.timing import interleaved, median_and_range

torch.set_num_threads(1)  # small tensors: a second thread only waits
FOLDER = Path(studies.__file__).parent
MODULES = [
    ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)
    for file in sorted(FOLDER.rglob("*.py"))
    if not file.stem.startswith("__")
]
RUN = [name for name in MODULES if hasattr(import_module(name), "main")]


ON_DEVICE = {"studies.launches"}


def printed(rank, ranks, name):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        import_module(name).main(["--tiny"])
    return out.getvalue()


def test_every_module_is_a_study_or_serves_one():
    imported = set()
    for file in FOLDER.rglob("*.py"):
        for folder, names in re.findall(
            r"^from (studies[\w.]*) import (\([^)]*\)|.*)", file.read_text(), re.M
        ):
            imported |= {folder, *(f"{folder}.{name}" for name in re.findall(r"\w+", names))}
    served = {name for name in MODULES if name not in RUN}
    assert set() == served - imported
    assert len(RUN) > 8


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "studies.scaling" else pytest.mark.thorough)
        for name in RUN
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_study_runs_in_its_tiny_form(name, capsys, request):
    study = import_module(name)
    assert f"python -m {name}" in study.__doc__
    if name in ON_DEVICE:  # which a process has to make before its first backward
        out = request.getfixturevalue("on_simulated_device")(printed, name)
    else:
        study.main(["--tiny"])
        out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert "| --- |" in out


def test_a_table_has_the_columns_of_its_first_row_in_their_order():
    rows = [{"b": "1", "a": "2"}, {"a": "3", "b": "4"}]
    assert "| b | a |\n| --- | --- |\n| 1 | 2 |\n| 4 | 3 |" == markdown_table(rows)
    assert "None were made." == markdown_table([])


def test_a_row_is_shown_before_the_next_is_made(capsys):
    def rows():
        yield {"a": "1"}
        assert "title\n\n| a |\n| --- |\n| 1 |\n" == capsys.readouterr().out
        yield {"a": "2"}

    show("title", rows())
    assert "| 2 |\n\n" == capsys.readouterr().out


def test_runs_take_turns_after_one_that_is_not_counted():
    turns = []
    times = interleaved([lambda: turns.append("a"), lambda: turns.append("b")], rounds=3)
    assert "ab" * 4 == "".join(turns)
    assert [2, 2, 2] == [len(row) for row in times]


def test_a_median_is_shown_with_its_range_and_without_values_as_a_dash():
    assert "1.2 [1.1, 1.5]" == median_and_range([1.1, 1.5, 1.2], digits=1)
    assert "-" == median_and_range([])
