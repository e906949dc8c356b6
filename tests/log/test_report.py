"""The report: one file that opens offline and shows what it should."""

import json
import re
import shutil
import subprocess

import pytest

from bigbatch.errors import RunError
from bigbatch.log import html_report
from bigbatch.log.history import Table, deviation, history_of, mean_text, seeds_of, table_of
from bigbatch.log.text_table import text_table, wrapped
from log_rows import add_rows, row, write_log

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
SETTINGS = {"policy": "simigrad", "target": 0.25, "epochs": 1}


def write_report(runs, out, title):
    html_report.write_report([history_of(run) for run in runs], out, title)


def run_at(path, rows, **settings):
    run = write_log(path, [], {**SETTINGS, **settings})
    for one in rows:
        add_rows(run, [one])
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def rows(batch, accuracy):
        return [row(s, batch=batch, accuracy=accuracy if s == 40 else None) for s in range(1, 41)]

    return [
        run_at(folder / "a0", rows(32, 0.90), arm="a", seed=0),
        run_at(folder / "a1", rows(32, 0.94), arm="a", seed=1),
        run_at(folder / "b0", rows(64, 0.50), arm="b", policy="fixed"),
    ]


def test_the_table_has_mean_and_standard_deviation_over_seeds(runs):
    histories = [history_of(run) for run in runs]
    assert [
        ("a", "92.00 ± 2.83", "40", "32", "1,280", "4.0 s"),
        ("b", "50.00", "40", "64", "2,560", "4.0 s"),
    ] == table_of(histories).rows
    assert "mean ± standard deviation over 1 to 2 seeds" == seeds_of(histories)


@pytest.mark.parametrize(
    ("values", "text", "spread"),
    [
        ([1.0, 2.0, 6.0], "3.00 ± 2.65", 7**0.5),
        ([2.0, 2.001], "2.00", 0.001 / 2**0.5),
        ([2.0], "2.00", 0.0),
    ],
)
def test_several_seeds_have_a_mean_and_a_deviation(values, text, spread):
    assert text == mean_text(values, 2)
    assert spread == pytest.approx(deviation(values))


@pytest.mark.parametrize("score", ["AUC", "masked tokens right, % (held out of wikipedia-2)"])
def test_a_table_is_shown_whole_in_80_columns(score):
    scores = [f"{score} {number}" for number in range(3)]
    columns = ("run", *scores, "steps", "average batch", "samples", "wall time")
    cells = ("a-long-name", "0.0123", "1.0123", "2.0123", "469", "64", "30,000", "82.4 s")
    said = text_table(Table(columns, [cells]), "one run a row", 80)
    assert max(map(len, said.splitlines())) <= 80
    assert all(cell in said for cell in cells[1:])
    assert "a-long-" in said


def test_a_table_of_long_numbers_is_wrapped_and_loses_none_in_80_columns():
    columns = ("policy", "lr", "test accuracy, %", "average batch", "steps", "wall time", "runs")
    cells = ("simigrad", "0.02", "64.44 ± 8.12 (2 of 3)", "79 ± 17", "34 ± 8 (3 skipped)")
    cells = (*cells, "0.5 ± 0.1 s", "3, 3 diverged")
    said = text_table(Table(columns, [cells]), "over 3 seeds", 80)
    assert max(map(len, said.splitlines())) <= 80
    assert all(word in said for cell in cells for word in cell.split())


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_columns_without_room_are_a_second_table(width):
    columns = ("run", *(f"a score of name {number}" for number in range(14)))
    rows = [(name, *(f"{number}{name}.0123" for number in range(14))) for name in "xy"]
    said = text_table(Table(columns, rows), "a title of some words, over 3 seeds", width)
    assert max(map(len, said.splitlines())) <= width
    assert all(cell in said for row in rows for cell in row)
    assert said.count("\nx ") == said.count("\ny ") == said.count("\n\n")


def test_a_text_is_wrapped_at_spaces_and_a_path_stays_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "/a/very/long/path/to/report.html"
    assert f"report: {path}" == wrapped(f"report: {path}")
    assert "  some words that\n  are wrapped" == wrapped("  some words that are wrapped")


def test_runs_of_other_settings_are_no_seeds_of_each_other(tmp_path):
    one = run_at(tmp_path / "s1" / "x", [row(1, accuracy=0.5)], arm="a")
    other = run_at(tmp_path / "s2" / "x", [row(1, accuracy=0.9)], arm="a", epochs=2)
    histories = [history_of(run) for run in (one, other, one)]
    names = [line[0] for line in table_of(histories).rows]
    assert ["s1/a", "s2/a (1 of 1 unfinished)"] == names
    assert "one run a row" == seeds_of(histories)


def test_runs_of_one_seed_are_said_to_be_of_one(tmp_path):
    def histories(*seeds):
        paths = [tmp_path / f"{number}-{seeds}" for number in range(len(seeds))]
        made = zip(paths, seeds, strict=True)
        return [history_of(run_at(path, [row(1)], arm="a", seed=seed)) for path, seed in made]

    over = "mean ± standard deviation over"
    assert f"{over} 2 runs of 1 seed" == seeds_of(histories(0, 0))
    assert f"{over} 3 runs of 2 seeds" == seeds_of(histories(0, 0, 1))
    assert f"{over} 2 seeds" == seeds_of(histories(0, 1))


def test_a_run_without_a_step_has_a_row_that_says_so(tmp_path):
    run = run_at(tmp_path / "empty", [], arm="late")
    assert ["late", "nothing yet"] == list(table_of([history_of(run)]).rows[0][:2])
    with pytest.raises(RunError, match="nothing to report"):
        write_report([run], tmp_path / "page.html", "empty")


def test_runs_that_begin_from_those_of_their_seed_are_seeds_of_each_other(tmp_path):
    for name in ("init_from", "lr_control_from"):
        runs = [
            run_at(tmp_path / f"{name}{s}", [row(1)], arm="b", seed=s, **{name: f"/x/a-seed{s}"})
            for s in (0, 1)
        ]
        assert 1 == len(table_of([history_of(run) for run in runs]).rows), name


def test_a_mean_over_fewer_runs_than_there_are_says_so(tmp_path):
    runs = [run_at(tmp_path / "s0", [row(1, accuracy=0.5)], arm="a", seed=0)]
    runs += [run_at(tmp_path / "s1", [row(1, metrics={"test accuracy, %": None})], arm="a", seed=1)]
    runs += [run_at(tmp_path / "s2", [], arm="a", seed=2)]
    ((name, score, *_),) = table_of([history_of(run) for run in runs]).rows
    assert "a (1 of 3 unfinished)" == name
    assert "50.00 (1 of 2)" == score
    write_report(runs, tmp_path / "page.html", "three")
    assert "a (1 of 3 unfinished)" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("scores", [None, {"test accuracy, %": 50.0}])
def test_a_run_has_finished_where_its_last_epoch_has_a_score(tmp_path, scores):
    run = run_at(tmp_path / "run", [row(1), row(2, metrics=scores)])
    assert (scores is not None) == history_of(run).finished
    before = run_at(tmp_path / "before", [row(1), row(2, metrics=scores)], epochs=2)
    assert not history_of(before).finished


def test_values_that_were_not_finite_leave_a_gap_and_no_error(tmp_path):
    gaps = {
        "grad_sqnorm": None,
        "grad_variance": None,
        "similarity": None,
        "noise_scale": None,
        "loss": None,
    }
    run = run_at(tmp_path / "run", [row(1), row(2, **gaps, skipped=True), row(3, grad_sqnorm=-5.0)])
    write_report([run], tmp_path / "page.html", "gaps")
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_skipped_steps_are_no_updates_and_said(tmp_path):
    lost = {"skipped": True, "grad_sqnorm": None, "grad_variance": None}
    run = run_at(tmp_path / "run", [row(1), row(2, **lost), row(3, **lost), row(4, accuracy=0.5)])
    history = history_of(run)
    assert (2, 2, 32.0) == (history.steps, history.skipped, history.average_batch)
    assert "2 (2 skipped)" == table_of([history]).rows[0][2]
    gap = history_of(
        run_at(tmp_path / "gap", [row(1), row(2, **lost), row(5)])
    )  # two were not logged
    assert (4, 32.0) == (gap.steps, gap.average_batch)


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """The report of two arms, whose title would be a script."""
    out = tmp_path_factory.mktemp("report") / "page.html"
    write_report(runs, out, "<script>alert(1)</script>")
    return out.read_text()


def test_the_page_asks_for_nothing_from_elsewhere(page):
    assert [] == re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*""", page)
    assert [] == re.findall(r"url\((?!#)[^)]*\)|@import", page)


def test_a_name_with_markup_is_shown_and_not_run(page):
    assert "<script>alert" not in page
    assert 1 == page.count("<script")  # its own
    assert "&lt;script&gt;alert(1)" in page


def test_the_page_of_many_arms_stays_small_and_one_file(tmp_path):
    def rows(arm):
        return [row(s, loss=arm + 1 / s, accuracy=0.5) for s in range(1, 81)]

    runs = [
        run_at(tmp_path / f"{arm}-{seed}", rows(arm), arm=f"lr={arm}", seed=seed)
        for arm in range(20)
        for seed in range(2)
    ]
    write_report(runs, tmp_path / "page.html", "many")
    assert (tmp_path / "page.html").stat().st_size < 1_500_000


def test_the_page_needs_no_script_to_show_its_curves(page):
    static = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    assert 18 == static.count('<svg viewBox="0 0 400 250"')


def dumped_by_browser(page, probe, tmp_path):
    """What a script that runs in the page writes as JSON, in headless Chromium."""
    script = f"<script>addEventListener('load', () => {{ {probe} }});</script>"
    probed = tmp_path / "page.html"
    probed.write_text(page.replace("</body>", script + "</body>"))
    offline = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * 0.0.0.0"]
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    dumped = subprocess.run(
        [
            BROWSER,
            *offline,
            *quiet,
            "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    return json.loads(re.search(r'<pre id="out">(.*?)</pre>', dumped, re.DOTALL)[1])


IN_BROWSER = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium (Debian: apt install chromium)"
)
WRITE = "document.body.innerHTML = '<pre id=out>' + JSON.stringify(out) + '</pre>';"


@IN_BROWSER
def test_a_browser_shows_the_table_and_every_panel_of_the_chosen_axis(page, tmp_path):
    probe = """const shown = e => e.getBoundingClientRect().width > 0;
      const found = tab => { document.getElementById(tab).checked = true;
        const svg = [...document.querySelectorAll('.tabs svg')].filter(shown);
        const [panels] = [...document.querySelectorAll('.panels')].filter(shown);
        return {panels: svg.length, width: svg[0].getBoundingClientRect().width,
                text: panels.textContent.replace(/\\s+/g, ' ')}; };
      const out = {rows: [...document.querySelectorAll('tbody tr')].filter(shown).length,
                   tabs: ['tab1', 'tab2', 'tab3'].map(found)};"""
    seen = dumped_by_browser(page, probe + WRITE, tmp_path)
    assert 3 == seen["rows"]  # two arms, and the difference of the second
    for tab, axis in zip(seen["tabs"], ("samples", "optimizer steps", "seconds"), strict=True):
        assert 6 == tab["panels"]
        assert tab["width"] > 300
        for words in (axis, "training loss", "batch size", "similarity", "target 0.25", "noise"):
            assert words in tab["text"]


@IN_BROWSER
def test_a_name_keeps_an_arm_in_view_by_a_click_and_escape_shows_all(page, tmp_path):
    probe = """const key = document.querySelector('button[data-series="1"]');
      const state = () => [document.querySelector('.arms').matches('.choosing'), key.ariaPressed,
        ...['g.series.on', 'g.series'].map(one => document.querySelectorAll(one).length)];
      const out = [state()];
      key.click(); out.push(state());
      key.click(); out.push(state());
      key.focus(); out.push(state());
      key.click(); dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'})); out.push(state());
      const svg = document.querySelector('.panels svg'), box = svg.getBoundingClientRect();
      const [line] = svg.querySelectorAll('g.series[data-series="1"] polyline.line');
      const {x, y} = line.points[0], scale = box.width / 400;
      svg.dispatchEvent(new PointerEvent('pointermove',
        {clientX: box.left + x * scale, clientY: box.top + y * scale}));
      out.push(svg.parentElement.querySelector('output').textContent);"""
    none, one = [False, "false", 0, 36], [True, "true", 18, 36]
    focused = [True, "false", 18, 36]
    *states, said = dumped_by_browser(page, probe + WRITE, tmp_path)
    assert [none, one, none, focused, none] == states
    assert "b: 2 at 64" == said


@IN_BROWSER
def test_a_page_of_400_pixels_has_one_column_and_does_not_scroll_sideways(page, tmp_path):
    frame = "<body><iframe style='width:400px;height:4000px;border:0'></iframe></body>"
    source = json.dumps(page).replace("</", "<\\/")
    probe = f"""const frame = document.querySelector('iframe');
      frame.onload = () => {{
        const inner = frame.contentDocument, panels = inner.querySelectorAll('#panel1 svg');
        const text = panels[0].querySelector('text');
        const out = {{width: inner.documentElement.scrollWidth,
          lefts: [...new Set([...panels].map(e => e.getBoundingClientRect().left))].length,
          letters: 11.5 * panels[0].getBoundingClientRect().width / 400,
          font: getComputedStyle(text).fontSize}};
        {WRITE} }};
      frame.srcdoc = {source};"""
    seen = dumped_by_browser(frame, probe, tmp_path)
    assert (400, 1, "11.5px") == (seen["width"], seen["lefts"], seen["font"])
    assert seen["letters"] > 10


def page_of(folder, runs):
    """The first sentence of the page of runs, and its text without marks."""
    out = folder / "page.html"
    write_report(runs, out, "the title")
    page = out.read_text()
    (sentence,) = re.findall(r"<h1>(.*?)</h1>", page)
    return sentence, " ".join(re.sub(r"<[^>]*>", " ", page).split())


def scored(path, name, value, **settings):
    steps = [row(step, metrics={name: value} if step == 40 else None) for step in range(1, 41)]
    return run_at(path, steps, **settings)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("test_accuracy", 0.982, "test accuracy 98.2 %"),
        ("eval/accuracy", 0.982, "eval accuracy 98.2 %"),
        ("test accuracy, %", 98.2, "test accuracy 98.2 %"),
        ("F1, % (300 questions)", 88.25, "F1 (300 questions) 88.2 %"),
        ("perplexity", 12.345, "perplexity 12.3"),
        ("word_error", 0.01234, "word_error 0.0123"),
        ("accumulated", 0.5, "accumulated 0.500"),
    ],
)
def test_the_page_of_a_run_begins_with_its_last_score_as_people_write_it(
    tmp_path, name, value, said
):
    sentence, text = page_of(tmp_path, [scored(tmp_path / "run", name, value)])
    assert f"run ends at {said}, after 40 steps of 32 samples, 4.0 s." == sentence
    assert " steps 40 average batch 32 samples 1,280 wall time 4.0 s Table: " in text


def test_a_run_without_scores_ends_at_its_training_loss(tmp_path):
    rows = [row(step, loss=3.0 if step < 37 else 0.25) for step in range(1, 41)]
    sentence, _ = page_of(tmp_path, [write_log(tmp_path / "run", rows, {"lr": 0.1})])
    assert "run ends at training loss 0.250, after 40 steps of 32 samples, 4.0 s." == sentence
    assert [("run", "0.2500", "40", "32", "1,280", "4.0 s")] == table_of(
        [history_of(tmp_path / "run")]
    ).rows


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(step) for step in range(1, 9)], "(unfinished)"),
        ([row(step, loss=step**2.0, accuracy=0.1) for step in range(1, 9)], "(diverged)"),
    ],
)
def test_the_page_of_a_run_says_whether_it_is_unfinished_or_diverged(tmp_path, rows, said):
    sentence, _ = page_of(tmp_path, [run_at(tmp_path / "run", rows)])
    assert said in sentence


def test_two_runs_without_repeats_are_not_tested(tmp_path):
    runs = [scored(tmp_path / arm, "acc", y, arm=arm, seed=0) for arm, y in (("a", 0.9), ("b", 1))]
    sentence, text = page_of(tmp_path, runs)
    assert "Acc: a 90.0 % and b 100.0 %; one run each, so no difference is tested." == sentence
    assert "one pair: no interval" in text


DIFFERENCES = {  # of b from a, by seed, and the result
    "not distinguished": (-0.02, 0.03, 0.01),
    "above": (0.010, 0.011, 0.012),
    "below": (-0.010, -0.011, -0.012),
    "equal in every pair: no interval": (0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("result", DIFFERENCES)
def test_the_sentence_of_arms_with_seeds_says_what_the_table_says(tmp_path, result):
    """Even where one arm is below in each of three seeds."""
    runs = [scored(tmp_path / f"a{s}", "acc", 0.8 + s / 50, arm="a", seed=s) for s in range(3)]
    for seed, difference in enumerate(DIFFERENCES[result]):
        score = 0.8 + seed / 50 + difference
        runs.append(scored(tmp_path / f"b{seed}", "acc", score, arm="b", seed=seed))
    sentence, text = page_of(tmp_path, runs)
    ends = " (paired by seed, 3 seeds)."
    verdict = {
        "above": "b is 1.10 points above a (95 % interval 0.85 to 1.35)",
        "below": "b is 1.10 points below a (95 % interval 0.85 to 1.35)",
        "not distinguished": "b is not distinguished from a",
    }.get(result, f"b: {result}")
    assert f"Acc: {verdict}{ends}" == sentence
    assert f" 3 {result} " in text
    others = DIFFERENCES.keys() - {result}
    assert not [other for other in others if other in text.replace(sentence, "")]


def test_several_arms_of_one_result_are_one_part_of_the_sentence(tmp_path):
    ends = {"a": 0.0, "b": 0.1, "c": 0.2, "d": 0.001}
    noise = (0.0, 0.002, -0.002)
    runs = [
        scored(tmp_path / f"{arm}{s}", "loss", y + s + noise[s] * (arm != "a"), arm=arm, seed=s)
        for arm, y in ends.items()
        for s in range(3)
    ]
    sentence, _ = page_of(tmp_path, runs)
    said = "Loss: b and c are above a; d is not distinguished from a (paired by seed, 3 seeds)."
    assert said == sentence


def test_plain_runs_and_an_adaptive_one_are_compared_by_the_time_to_the_same_loss(tmp_path):
    unmeasured = {"grad_sqnorm": None, "grad_variance": None, "similarity": None}

    def plain(name, steps, batch):
        rows = [
            row(s, batch=batch, loss=2 - s / steps, elapsed_seconds=s / 10, **unmeasured)
            for s in range(1, steps + 1)
        ]
        return write_log(tmp_path / name, rows, {"batch_size": batch})

    adaptive = [row(s, batch=64, loss=3 - 2 * s / 60, elapsed_seconds=s / 5) for s in range(1, 61)]
    runs = [
        plain("present", 240, 16),
        plain("advised", 60, 64),
        write_log(tmp_path / "adaptive", adaptive, {"policy": "NoiseScale()"}),
    ]
    sentence, text = page_of(tmp_path, runs)
    assert (
        "A training loss of 1.07, which all reach, takes 23.6 s and 3,776 samples with present, "
        "5.8 s and 3,712 samples with advised, 12.0 s and 3,840 samples with adaptive; one run "
        "each, so chance is not excluded." == sentence
    )
    assert "score" not in text.replace("The axis of a score", "")
    assert "training loss, 240 steps of 16 samples, 24.0 s" in text  # a tile


def test_the_sentence_counts_the_pairs_of_each_arm_and_says_that_lower_is_better(tmp_path):
    own = {"higher_is_better": False}
    ends = {"a": (3.0, 4.0, 5.0), "b": (2.0, 3.1, 4.0), "c": (3.1, 4.0)}
    runs = [
        scored(tmp_path / f"{arm}{seed}", "bits", y, arm=arm, seed=seed, **own)
        for arm, values in ends.items()
        for seed, y in enumerate(values)
    ]
    sentence, _ = page_of(tmp_path, runs)
    assert (
        "c is not distinguished from a (paired by seed, 2 to 3 seeds); lower is better." in sentence
    )
    assert sentence.startswith("Bits: b is 0.9667 below a (95 % interval 0.8232 to 1.1101); ")
