"""The figure of costs has the numbers of docs/benchmarks.md, and damage to a table is named."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bigbatch.errors import RunError
from studies.results import cost_figure
from studies.results.markdown import table_of
from studies.results.questions import draw

PAGE = (Path(__file__).parents[3] / "docs/benchmarks.md").read_text()
VR = "VRSGD, groups"
MADE = f"""# Benchmarks

## The loop over a plain loop

| network | batch | plain step, ms | default | groups, every step | cut, every step | {VR} |
|---|---|---|---|---|---|---|
| a | 64 | 90.00 [80, 100] | 1.10 [1.00, 1.20] | refused | 1.2 [1, 2] | 1.3 [1, 2] |
| a | 32 | 40.00 [39, 41] | 1.30 [1.00, 1.40] | 1.50 [1.40, 1.60] | 1.2 [1, 2] | 1.3 [1, 2] |

## What measuring costs

Text.

| network, parameters | nothing | similarity | similarity and interval | second moment |
|---|---|---|---|---|
| linear layers, T = 8, 1 M | 1.0 [1, 1] | 1.2; floor 1.1, 1.1 x it | 1.3 | 1.4 [1, 2] |
| linear layers, T = 32, 1 M | 1.0 [1, 1] | 1.1; floor 1.0, 1.1 x it | 1.2 [1, 2] | 1.3 [1, 2] |
| transformer, T = 8 x 128, 1 M | 1.0 [1, 1] | 1.0; floor 1.0, 1.0 x it | 1.1 [1, 2] | 1.2 [1, 2] |
| ResNet-18, 8 images, 11.2 M | 1.0 [1, 1] | 1.0; floor 1.0, 1.0 x it | 1.1 [1, 2] | 1.2 [1, 2] |

## What ranks send

| engine | what | sent x plain |
|---|---|---|
| DDP | plain | 1.00000 |
| DDP | similarity | 1.00002 |
| DDP | similarity | 1.00004 |
| DDP | SimiGrad, re-created | 2.00000 |

## Under DeepSpeed

| engine | what | sent x plain |
|---|---|---|
| ZeRO-0 | plain, a = 4 | 1.00000 |
| ZeRO-0 | VR, a = 4 | 4.00002 |

## Optimizer steps

| list | optimizer | x base |
|---|---|---|
| 1 M in 16 | AdamW, torch fused | 1.00 [1.00, 1.00] |
| 1 M in 16 | VR-Adam | 2.15 [1.94, 2.19] |
| 1 M in 16 | VR-Adam, GSNR by torch | 5.04 [4.74, 5.43] |
| 10 M in 16 | VR-Adam | 2.27 [2.25, 2.39] |
"""
SECTIONS = re.findall("^## (.+)$", MADE, re.MULTILINE)


def test_a_table_is_the_first_of_its_section():
    page = "## A\ntext\n\n## B\n| c |\n|---|\n| 1 |\n\n| d |\n|---|\n| 2 |\n"
    assert [{"c": "1"}] == table_of(page, "B")
    with pytest.raises(ValueError, match="no table"):
        table_of(page, "A")
    with pytest.raises(ValueError, match="no such section"):
        table_of(page, "C")
    with pytest.raises(ValueError, match="zip"):
        table_of("## B\n| c | d |\n|---|---|\n| 1 |\n", "B")


def test_steps_are_in_the_order_of_the_plain_step_without_those_that_are_refused():
    costs = cost_figure.loop_costs(MADE)
    assert [(40.0, 1.3), (90.0, 1.1)] == [(one.x, one.ratio) for one in costs["default"]]
    assert [("a, 32", 1.4, 1.6)] == [
        (one.row, one.low, one.high) for one in costs["groups, every step"]
    ]


def test_a_micro_batch_is_counted_in_tokens_or_images():
    costs = cost_figure.statistic_costs(MADE)["similarity"]
    assert [8, 8, 32, 1024] == [one.x for one in costs]
    assert [1.1, 1.0, 1.0, 1.0] == [one.floor for one in costs]


def test_bytes_are_those_of_both_tables_without_plain_steps():
    costs = cost_figure.byte_costs(MADE)
    assert {
        "similarity": [1.00002, 1.00004],
        "SimiGrad, re-created": [2.0],
        "VR, a = 4": [4.00002],
    } == {name: [one.ratio for one in ones] for name, ones in costs.items()}


def test_optimizers_are_those_with_the_built_in_kernel():
    costs = cost_figure.optimizer_costs(MADE)
    assert {"VR-Adam": [2.15, 2.27]} == {
        name: [one.ratio for one in ones] for name, ones in costs.items()
    }


def test_the_table_has_medians_and_ends_by_hand():
    rows = cost_figure.tables(MADE).splitlines()
    assert "| step, over a plain loop's | default | 1.20 | 1.10 to 1.30 | 2 |" in rows
    assert (
        "| bytes sent, over a plain step's | similarity | 1.00003 | 1.00002 to 1.00004 | 2 |"
        in rows
    )
    assert "| optimizer step, over its base's | VR-Adam | 2.21 | 2.15 to 2.27 | 2 |" in rows


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_or_damaged_table_is_named(section):
    heading = f"## {section}\n"
    start = MADE.index(heading) + len(heading)
    cut = (MADE[start:] + "\n## ").index("\n## ") + start
    table = MADE[start:cut]
    damaged = {
        "no section": MADE.replace(heading, "## Another\n"),
        "no table": MADE.replace(table, "text\n"),
        "no rows": MADE.replace(table, "\n".join(table.rstrip().split("\n")[:-1][:3]) + "\n"),
        "no number": MADE[:cut].rstrip()[:-2] + "x |\n" + MADE[cut:],
        "no cell": MADE[:cut].rstrip() + " 1 |\n" + MADE[cut:],
        "no column": MADE.replace(table, table.replace("plain", "fast").replace("x base", "y")),
    }
    del damaged["no column" if section == SECTIONS[1] else "no rows"]
    for damage, page in damaged.items():
        assert page != MADE, damage
        with pytest.raises(RunError, match=section):
            cost_figure.figure(page)


def test_the_page_of_benchmarks_has_every_table():
    figure = cost_figure.figure(PAGE)
    assert 4 == len(figure.axes)
    counts = re.findall(r"\| (\d+) \|$", cost_figure.tables(PAGE), re.MULTILINE)
    assert 22 == len(counts)
    drawn = [len(axes.patches) for axes in figure.axes]
    assert [0, 0, 19, 0] == drawn  # bars of bytes


def test_no_label_of_the_figure_leaves_it_or_is_over_another():
    figure = cost_figure.figure(PAGE)
    figure.draw_without_rendering()
    width, height = figure.canvas.get_width_height()
    for axes in figure.axes:
        title = axes.get_title(loc="left")
        assert title
        box = axes.get_tightbbox()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, title
    left, right = figure.axes[::2], figure.axes[1::2]
    for one, other in zip(left, right, strict=True):
        assert one.get_tightbbox().x1 <= other.get_tightbbox().x0


def test_results_draw_writes_the_figure_and_the_table_from_the_page_alone(tmp_path):
    logs = tmp_path / "docs/results"
    logs.mkdir(parents=True)
    (logs.parent / "benchmarks.md").write_text(MADE)
    page = logs.parent / "results.md"
    page.write_text("<!-- results: cost -->\nold\n<!-- end -->\n")
    assert [logs / "cost.png", page] == draw(logs)
    assert cost_figure.tables(MADE) in page.read_text()
    assert (logs / "cost.png").stat().st_size > 10_000
