"""compare, report and replay: what they show of any log, and one line for what is wrong."""

import pytest

from log_rows import row, write_log

SETTINGS = {"arm": "mine", "policy": "simigrad", "target": 0.25, "epochs": 1}

WRONG = [
    (["compare", "nowhere"], "there is no run directory nowhere"),
    (["report", "."], "has no metrics.jsonl"),
    (["report"], "RUN"),
    (["report", "a", "b"], "several runs have no common place for their report"),
    (["report", "a", "-o", "page.docx"], "-o page.docx: the ending must be .html or .svg"),
    (
        ["compare", "a", "--speed", "3"],
        "unrecognized arguments: --speed 3; bigbatch compare --help",
    ),
    (["compare", "a", "--to", "high"], "invalid float value: 'high'"),
    (["replay", "a", "--policy", "magic"], "policy 'magic' is unknown; choose one of: fixed"),
    (["replay", "a", "--policy", "fixed:8", "--dead-band", "x"], "dead_band='x' must be a number"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_line_and_writes_nothing(
    bigbatch, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch(*arguments)
    assert (2, "", 1) == (status, out, err.count("\n"))
    assert err.startswith("bigbatch: ")
    assert message in err
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["[1]", '{"step": 1}', "\udcff"])
def test_a_damaged_log_is_one_line(bigbatch, tmp_path, line):
    run = write_log(tmp_path / "run", [])
    log = f"{line}\n{line}\n".encode(errors="surrogateescape")
    (run / "metrics.jsonl").write_bytes(log)
    for command in ("compare", "report"):
        status, _, err = bigbatch(command, run)
        assert (2, 1) == (status, err.count("\n"))
        assert "line 1 is" in err


def test_an_arm_and_a_score_that_steer_terminals_are_shown_by_escapes(bigbatch, tmp_path):
    name = "\x1b]0;evil\a\r\u2066\nx"
    run = write_log(tmp_path / "run", [row(1, metrics={name: 1.0})], {**SETTINGS, "arm": name})
    for command in (("compare",), ("report",), ("replay", "--policy", "fixed:8")):
        status, out, _ = bigbatch(*command, run)
        assert 0 == status
        assert all(letter.isprintable() for letter in out.replace("\n", ""))
        assert r"\x1b]0;evil\x07\r\u2066" in out or command == ("report",)
    assert not {"\x1b", "\u2066"} & {*(run / "report.html").read_text()}


@pytest.fixture
def runs(tmp_path):
    """A folder of two logs."""
    for seed in (0, 1):
        rows = [row(step, accuracy=0.5 if step == 5 else None) for step in range(1, 6)]
        write_log(tmp_path / "runs" / f"seed{seed}", rows, {**SETTINGS, "seed": seed})
    return tmp_path / "runs"


def test_a_folder_of_logs_is_as_good_as_its_logs(bigbatch, runs):
    together, apart = bigbatch("compare", runs), bigbatch("compare", *sorted(runs.iterdir()))
    assert together == apart
    assert "over 2 seeds" in together[1]


def test_a_report_goes_where_it_is_asked(bigbatch, runs, tmp_path):
    page, figure = tmp_path / "page.html", tmp_path / "curves.svg"
    assert (0, f"report: {page}\n", "") == bigbatch("report", runs, "-o", page)
    assert "<svg" in page.read_text()
    assert (0, f"report: {figure}\n", "") == bigbatch("report", runs, "-o", figure)
    assert figure.read_text().startswith("<svg")
    status, _, err = bigbatch("report", runs, "-o", tmp_path / "no" / "such" / "folder.html")
    assert (2, True) == (status, "cannot be written" in err)
    assert 0 == bigbatch("report", runs)[0]
    assert (runs / "report.html").exists()


def test_ranks_but_the_first_of_a_launch_do_nothing(bigbatch, runs, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for arguments in (["compare", runs], ["report", runs], ["replay", runs, "--policy", "fixed:8"]):
        assert (0, "", "") == bigbatch(*arguments)
    assert not (runs / "report.html").exists()
