"""What the command writes: files that are nobody else's."""

import pytest

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import require_own_file, write_atomically
from bigbatch.log.chart import Panel, Series
from bigbatch.log.chart_svg import svg
from bigbatch.log.html_report import write_text
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
OUTPUTS = [("report", ".html"), ("report", ".svg"), ("replay", ".svg")]


@pytest.mark.parametrize(("command", "ending"), OUTPUTS)
def test_a_file_that_bigbatch_did_not_write_is_left_alone(bigbatch, run, tmp_path, command, ending):
    out = tmp_path / f"mine{ending}"
    out.write_bytes(b"<html>my page about bigbatch</html>")
    status, _, said = bigbatch(*WRITERS[command](run, out))
    assert 2 == status
    assert f"{out} was not written by bigbatch and is left as it is" in said
    assert b"<html>my page about bigbatch</html>" == out.read_bytes()


@pytest.mark.parametrize(("command", "ending"), [("report", ".svg"), ("replay", ".svg")])
def test_an_empty_file_and_its_own_are_replaced(bigbatch, run, tmp_path, command, ending):
    out = tmp_path / f"ours{ending}"
    out.touch()  # as mktemp makes one
    for _ in range(2):
        status, _, said = bigbatch(*WRITERS[command](run, out))
        assert (0, "") == (status, said)
    assert out.stat().st_size > 1000


FIGURE = svg([Panel("loss", "samples", [Series("a", [1, 2], [1, 2])])], standalone=True)


def test_a_figure_of_somebody_else_is_not_taken_for_ours(tmp_path):
    theirs = tmp_path / "plot.svg"
    theirs.write_text('<svg xmlns="http://www.w3.org/2000/svg"><title>bigbatch</title></svg>')
    with pytest.raises(RunError, match="was not written by bigbatch"):
        require_own_file(theirs)
    write_text(tmp_path / "ours.svg", FIGURE)
    require_own_file(tmp_path / "ours.svg")


@pytest.mark.parametrize("command", ["report", "replay"])
def test_a_figure_as_png_is_refused_with_the_name_of_the_svg(bigbatch, run, tmp_path, command):
    status, out, said = bigbatch(*WRITERS[command](run, tmp_path / "curves.png"))
    assert (2, "", 1) == (status, out, said.count("\n"))
    assert "figures are SVG: curves.svg" in said


def test_a_folder_is_no_place_for_a_file(tmp_path):
    with pytest.raises(RunError, match="is not a file"):
        require_own_file(tmp_path)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "no bytes")
    assert (b"old", [target]) == (target.read_bytes(), list(tmp_path.iterdir()))


def test_a_figure_that_does_not_fit_leaves_the_old_one(tmp_path):
    out = tmp_path / "curves.svg"
    write_text(out, FIGURE)
    before = out.read_bytes()
    (tmp_path / ".curves.svg.new").symlink_to("/dev/full")
    with pytest.raises(RunError, match="cannot be written: No space left"):
        write_text(out, FIGURE)
    assert before == out.read_bytes()


def test_without_a_place_the_report_of_a_run_is_replaced_whoever_wrote_it(bigbatch, run):
    """An earlier version's has no mark; the place within the run is ours. What is there now has."""
    page = run / "report.html"
    page.write_text("<html>")
    assert 0 == bigbatch("report", run)[0]
    require_own_file(page)
