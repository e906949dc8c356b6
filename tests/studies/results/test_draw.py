"""`draw` on made logs; and the committed pages have what it writes from the committed logs."""

import json
from itertools import product
from pathlib import Path

import pytest

from bigbatch.errors import RunError
from made_runs import fresh, log_of, tuning
from studies.results import any_start, batch_comparisons
from studies.results.__main__ import main
from studies.results.any_start import BATCHES, POLICIES, RATES, WARMUPS, arm_of
from studies.results.batch_comparisons import CONTROLLED, DOUBLING, equal_steps, fixed, replay_of
from studies.results.comparison_log import LoggedRun, log_text
from studies.results.questions import draw, fill, pages_of, tables_of

BASE = fixed(64)

LOGS = Path(__file__).parents[3] / "docs" / "results"
BATCH, START = batch_comparisons.COMPARISONS[0].name, any_start.COMPARISON.name


def write_logs(folder):
    """A log of batches, in which a run failed and one diverged, and one of starts."""
    folder.mkdir()
    arms = [BASE, DOUBLING, *CONTROLLED, *map(replay_of, CONTROLLED), *map(equal_steps, CONTROLLED)]
    runs = [
        fresh(arm, seed, 90.0 + seed * n / 10, reached_at=20 + n * seed)
        for n, arm in enumerate(arms)
        for seed in range(3)
    ]
    runs[0] = LoggedRun(BASE, 0.1, 0, tuning=False, failure="killed")
    runs[-1] = fresh(arms[-1], 2, diverged=True)
    (folder / f"{BATCH}.json").write_text(log_text(log_of(*runs, *map(tuning, arms))))
    starts = product(POLICIES, BATCHES, WARMUPS, RATES, (0, 1))
    runs = [fresh(arm_of(*of), seed, 80.0 + 9 * seed, lr=lr) for *of, lr, seed in starts]
    (folder / f"{START}.json").write_text(log_text(log_of(*runs)))


def page_of(*names):
    return "\n".join(f"<!-- results: {name} -->\nold\n<!-- end -->\nkept" for name in names)


def test_figures_and_pages_are_drawn_from_the_logs_alone(tmp_path):
    logs = tmp_path / "results"
    write_logs(logs)
    (tmp_path / "results.md").write_text(page_of(BATCH, START))
    (logs / "one.md").write_text(page_of(START))
    pages = [tmp_path / "results.md", logs / "one.md"]
    figures = [logs / f"{name}.svg" for name in (BATCH, "score-over-steps", START)]
    assert [*pages, *figures] == draw(logs)
    assert all(figure.read_text().startswith("<svg") for figure in figures)
    texts = [page.read_text() for page in pages]
    assert "old" not in "".join(texts)
    assert texts[1] in texts[0]
    assert "nan" not in texts[0]
    assert "inf" not in texts[0]


def test_a_page_that_lacks_a_log_stops_before_anything_is_written(tmp_path):
    logs = tmp_path / "results"
    write_logs(logs)
    (logs / "one.md").write_text(page_of(START, "estimates"))
    with pytest.raises(RunError, match="there is no log for estimates"):
        draw(logs)
    assert not list(logs.glob("*.svg"))


def test_the_shares_of_starts_need_the_target_of_the_batches(tmp_path):
    write_logs(tmp_path / "results")
    (tmp_path / "results" / f"{BATCH}.json").unlink()
    with pytest.raises(RunError, match=rf"{BATCH}.json is not the log of a comparison"):
        draw(tmp_path / "results")


def test_a_folder_without_logs_is_an_error(tmp_path):
    with pytest.raises(RunError, match="there is no log in"):
        draw(tmp_path)


def test_the_committed_pages_have_the_tables_of_the_committed_logs():
    tables, pages = tables_of(LOGS), {page: page.read_text() for page in pages_of(LOGS)}
    outdated = [page.name for page, text in pages.items() if fill(text, tables) != text]
    assert [] == outdated  # `python -m studies.results draw` writes them
    shown = "".join(pages.values())
    assert [] == [name for name in tables if f"<!-- results: {name} -->" not in shown]


def test_the_committed_figures_are_drawn_from_the_committed_logs(tmp_path):
    for log in LOGS.glob("*.json"):
        (tmp_path / log.name).symlink_to(log)
    for path in draw(tmp_path):
        assert path.read_text() == (LOGS / path.name).read_text(), path.name


@pytest.mark.parametrize(
    "page", ["<!-- results: a -->\nold", "<!-- results: a --> old\n<!-- end -->"]
)
def test_a_place_that_would_be_left_out_is_an_error(page):
    with pytest.raises(RunError, match="write each place as"):
        fill(page, {"a": "new"})


def test_a_mistake_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["draw", "--logs", str(tmp_path)])
    assert 1 == ending.value.code
    assert 1 == capsys.readouterr().err.count("\n")


def test_every_committed_log_is_json():
    def refuse(name):
        raise AssertionError(name)

    for log in LOGS.glob("*.json"):
        json.loads(log.read_text(), parse_constant=refuse)
