"""What the command writes: files that are nobody else's."""

import pytest
from bigbatch.log.curves import write_figure
from matplotlib.figure import Figure
from PIL import Image

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import require_own_file
from log_rows import add_rows, row, write_log

SETTINGS = {"policy": "simigrad", "target": 0.25, "epochs": 1}


@pytest.fixture
def run(tmp_path):
    run = write_log(tmp_path / "run", [], SETTINGS)
    for step in range(1, 6):
        add_rows(run, [row(step, accuracy=0.5 if step == 5 else None)])
    return run


WRITERS = {
    "report": lambda run, out: ("report", run, "-o", out),
    "replay": lambda run, out: ("replay", run, "--policy", "fixed:64", "-o", out),
}
OUTPUTS = [("report", ".html"), ("report", ".png"), ("report", ".svg"), ("replay", ".svg")]


@pytest.mark.parametrize(("command", "ending"), OUTPUTS)
def test_a_file_that_bigbatch_did_not_write_is_left_alone(bigbatch, run, tmp_path, command, ending):
    out = tmp_path / f"mine{ending}"
    out.write_bytes(b"<html>my page about bigbatch</html>")
    status, _, said = bigbatch(*WRITERS[command](run, out))
    assert 2 == status
    assert f"{out} was not written by bigbatch and is left as it is" in said
    assert b"<html>my page about bigbatch</html>" == out.read_bytes()


@pytest.mark.parametrize(("command", "ending"), [("report", ".png"), ("replay", ".svg")])
def test_an_empty_file_and_its_own_are_replaced(bigbatch, run, tmp_path, command, ending):
    out = tmp_path / f"ours{ending}"
    out.touch()  # as mktemp makes one
    for _ in range(2):
        status, _, said = bigbatch(*WRITERS[command](run, out))
        assert (0, "") == (status, said)
    assert out.stat().st_size > 1000


def test_a_figure_of_somebody_else_is_not_taken_for_ours(tmp_path):
    theirs = tmp_path / "plot.png"
    Figure().savefig(theirs)
    with pytest.raises(RunError, match="was not written by bigbatch"):
        require_own_file(theirs)
    write_figure(Figure(), tmp_path / "ours.png")
    require_own_file(tmp_path / "ours.png")
    assert "bigbatch" == Image.open(tmp_path / "ours.png").text["Software"]


def test_a_folder_is_no_place_for_a_file(tmp_path):
    with pytest.raises(RunError, match="is not a file"):
        require_own_file(tmp_path)


@pytest.mark.thorough
def test_the_figure_of_a_bench_is_refused_before_anything_is_measured(bigbatch, tmp_path):
    out = tmp_path / "mine.png"
    Figure().savefig(out)
    before = out.read_bytes()
    status, shown, said = bigbatch("bench", "similarity-accuracy", "--out", out)
    assert (2, "") == (status, shown)
    assert "was not written by bigbatch" in said
    assert before == out.read_bytes()


def test_a_figure_that_does_not_fit_leaves_the_old_one(tmp_path):
    out = tmp_path / "curves.png"
    write_figure(Figure(), out)
    before = out.read_bytes()
    (tmp_path / ".curves.png.new").symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot be written: No space left"):
        write_figure(Figure(), out)
    assert before == out.read_bytes()


def test_without_a_place_the_report_of_a_run_is_replaced_whoever_wrote_it(bigbatch, run):
    """An earlier version's has no mark; the place within the run is ours. What is there now has."""
    page = run / "report.html"
    page.write_text("<html>")
    assert 0 == bigbatch("report", run)[0]
    require_own_file(page)
