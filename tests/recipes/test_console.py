"""The progress of a training: one line that updates on a terminal, a few lines elsewhere."""

import io
import sys
from dataclasses import replace

import pytest

from bigbatch import GradientStatistics
from bigbatch_recipes.console import LiveView, TrainingView, sparkline
from made_records import made_record

STATISTICS = GradientStatistics(1.0, 64.0, samples=32, micro_batches=4)
SIZES = [32] * 10 + [64] * 10 + [128] * 10
SCORES = {"test accuracy, %": 98.25, "test loss": 0.0372}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, monkeypatch, name="12/18 simigrad-vr-seed2", *, quiet=False):
    """What a training of these batch sizes writes."""
    monkeypatch.setattr(sys, "stdout", stream)
    view = TrainingView(LiveView(quiet=quiet), name, sum(SIZES), 0, 0.3)
    for number, size in enumerate(SIZES):
        record = made_record(size, statistics=STATISTICS)
        samples = sum(SIZES[: number + 1])
        view.step(replace(record, samples=samples, elapsed_seconds=0.06 * number), SCORES)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_a_line_is_replaced_on_a_terminal_and_never_wraps(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    *states, end = shown(Terminal(), monkeypatch).split("\r")
    assert 15 == len(states)  # 30 steps of 0.06 seconds, ten states a second at most; the last
    assert 1 == end.count("\n")
    assert all(len(state.removesuffix("\x1b[K")) < columns for state in (*states, end.rstrip()))
    assert "▁▁▃▃▃▄▅▅▅▅▅▅" in end or columns < 80


def test_elsewhere_a_training_has_a_few_plain_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = shown(io.StringIO(), monkeypatch)
    assert 5 == out.count("\n")
    assert not {"\r", "\x1b"} & {*out}
    assert max(map(len, out.splitlines())) < 80
    assert "" == shown(io.StringIO(), monkeypatch, quiet=True)


def test_a_wide_line_has_everything_in_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    last = shown(io.StringIO(), monkeypatch).splitlines()[-1]
    for words in ("100 %", "batch 128", "loss 1.000", "test accuracy 98.2 %", "test loss 0.0372"):
        assert words in last
    for words in ("similarity 0.20 (target 0.3)", "noise scale 64", "lr 0.1", "samples/s"):
        assert words in last


def test_a_stream_without_the_bars_gets_other_letters(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    LiveView().print("▁▃ ± 1")
    stream.seek(0)
    assert "?? ? 1\n" == stream.read()


def test_the_bars_of_a_constant_batch_are_level_and_those_of_a_growing_one_rise():
    assert "▁▁▁" == sparkline({0: [32], 1: [35], 2: [32]})
    assert "▁▃▅▇" == sparkline({0: [32], 1: [64], 2: [128], 3: [256]})
    assert "▁█" == sparkline({0: [1], 1: [1_000_000]})


def test_a_training_that_is_resumed_has_no_bars_for_its_first_part():
    assert "  ▁▃" == sparkline({2: [32], 3: [64]})
