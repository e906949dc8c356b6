"""DLRM on click logs: the readers, the network, the scores, and a training on real rows."""

import errno
import fcntl
import gzip
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.click_log import (
    CLICK,
    Clicks,
    generate,
    read_clicks,
    read_criteo,
    read_packed,
    sort_days,
    split,
)
from bigbatch_recipes.datasets.locations import CRITEO
from bigbatch_recipes.dlrm import DLRM_CRITEO
from bigbatch_recipes.models.dlrm_network import DLRM
from bigbatch_recipes.tasks.clicks import click_scores
from bigbatch_recipes.train_run import Training
from real_data import FOLDER, needs

TINY = {"log_rows": 2_000, "table_rows": 50, "bottom": "8-4", "top": "8-1"}
INTEGERS = [str(number) for number in range(13)]
CODES = [f"{number:08x}" for number in range(100, 126)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder; what is packed is in its folder bigbatch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bigbatch"


def line(label="1", integers=INTEGERS, codes=CODES):
    return "\t".join([label, *integers, *codes]) + "\n"


def log_at(path, *lines):
    path.write_text("".join(lines))
    return path


def tiny(**changes):
    return DLRM_CRITEO.settings().with_changes({**TINY, **changes})


def test_a_row_is_read_as_it_is_published(tmp_path):
    missing = line("0", ["", "-2", *INTEGERS[2:]], ["", "ffffffff", *CODES[2:]])
    ((labels, integers, codes),) = read_clicks(log_at(tmp_path / "train.txt", line(), missing))
    assert [1, 0] == labels.tolist()
    assert list(range(13)) == integers[0].tolist()
    assert numpy.isnan(integers[1, 0])
    assert -2 == integers[1, 1]
    assert list(range(100, 126)) == codes[0].tolist()
    assert [0, 0xFFFFFFFF, 102] == codes[1, :3].tolist()


def test_what_lacks_at_a_lines_end_counts_as_missing(tmp_path):
    ((_, _, codes),) = read_clicks(log_at(tmp_path / "day_0", line(), line(codes=CODES[:-1])))
    assert [[124, 125], [124, 0]] == codes[:, -2:].tolist()


def test_a_file_is_the_same_in_chunks_and_compressed(tmp_path):
    lines = [line(str(number % 2), codes=[f"{number:08x}"] * 26) for number in range(7)]
    plain = log_at(tmp_path / "day_0", *lines)
    zipped = tmp_path / "day_1.gz"
    zipped.write_bytes(gzip.compress("".join(lines).encode()))
    whole, parts = list(read_clicks(plain)), list(read_clicks(zipped, rows=3))
    assert [3, 3, 1] == [len(part[0]) for part in parts]
    for number in range(3):
        together = numpy.concatenate([part[number] for part in parts])
        numpy.testing.assert_array_equal(whole[0][number], together)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("label,I1\n", "could not convert"),
        ("1\t2\n", "2 columns"),
        ("", "No columns to parse"),
        (line("2"), "label 2.0"),
        (line(codes=["zzzzzzzz", *CODES[1:]]), "category 'zzzzzzzz'"),
        (line(codes=["123456789", *CODES[1:]]), "category '123456789'"),
        (line(integers=["many", *INTEGERS[1:]]), "could not convert string to float"),
        (line() + line(codes=[*CODES, "0"]), "Expected 40 fields in line 2, saw 41"),
    ],
)
def test_a_malformed_file_is_one_error_that_says_what_is_needed(tmp_path, wrong, reason):
    file = log_at(tmp_path / "train.txt", wrong)
    with pytest.raises(RunError, match="40 columns") as found:
        list(read_clicks(file))
    assert reason in str(found.value)
    assert str(file) in str(found.value)


def test_a_cut_download_is_an_error(tmp_path):
    whole = gzip.compress("".join([line()] * 1000).encode())
    (tmp_path / "day_0.gz").write_bytes(whole[:-20])
    with pytest.raises(RunError, match="no click log of Criteo"):
        list(read_clicks(tmp_path / "day_0.gz"))


def copies(cache):
    return sorted(cache.glob("*.packed"))


def test_packed_rows_hold_logarithms_and_lie_in_the_users_cache(tmp_path, cache):
    (tmp_path / "data").mkdir()
    file = log_at(tmp_path / "data" / "train.txt", line("0", ["", "-2", "9", *INTEGERS[3:]]))
    with pytest.warns(UserWarning, match=f"is packed once, into {cache}, 157 bytes a row"):
        rows = read_packed(file)
    assert isinstance(rows, numpy.memmap)
    assert [157] == [copy.stat().st_size for copy in copies(cache)]
    assert [0, 0, numpy.log(10).astype("float32")] == rows["numbers"][0, :3].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert rows.tobytes() == read_packed(file).tobytes()
    assert [file] == list(file.parent.iterdir())


def test_two_files_of_one_name_are_packed_apart(tmp_path, cache):
    for number, rows in enumerate(([line()], [line("0"), line("0")])):
        (tmp_path / str(number)).mkdir()
        found = read_packed(log_at(tmp_path / str(number) / "train.txt", *rows))
        assert [number == 0] * len(rows) == found["label"].tolist()
    assert 2 == len(copies(cache))


def rows_when_all_begin(rank, ranks, file, folder):
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return read_packed(file).tobytes()


@pytest.mark.early
def test_processes_that_pack_at_once_read_the_same(tmp_path, cache, ranks):
    lines = [line(str(n % 2), codes=[f"{n:08x}"] * 26) for n in range(2_000)]
    file = log_at(tmp_path / "train.txt", *lines)
    first, second = ranks(2)(rows_when_all_begin, file, cache.parent)
    assert first == second == read_packed(file).tobytes()
    assert 1 == len(copies(cache))


@pytest.mark.parametrize("named", ["a file", "relative", "nothing"])
def test_a_cache_folder_that_cannot_be_is_one_line(tmp_path, monkeypatch, named):
    """A relative XDG_CACHE_HOME counts as none; the home's .cache is a file here."""
    file = log_at(tmp_path / "train.txt", line(), line("0"))
    (tmp_path / ".cache").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    places = {"a file": tmp_path / ".cache", "relative": "here", "nothing": ""}
    monkeypatch.setenv("XDG_CACHE_HOME", str(places[named]))
    message = r"train.txt cannot be packed into .* let XDG_CACHE_HOME name another folder"
    with pytest.raises(RunError, match=message):
        read_packed(file)
    assert {file, tmp_path / ".cache"} == set(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_rows_that_do_not_fit_into_the_cache_are_one_line(tmp_path, cache):
    file = log_at(tmp_path / "train.txt", line())
    read_packed(file)
    (copy,) = copies(cache)
    copy.unlink()
    copy.with_name(f".{copy.name}.new").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"train.txt cannot be packed into .*No space left"):
        read_packed(file)


def test_a_file_system_without_locks_is_named_with_the_remedy(tmp_path, cache, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = f"{cache}/.*lock cannot be locked .No locks available.; let XDG_CACHE_HOME name"
    with pytest.raises(RunError, match=message):
        read_packed(log_at(tmp_path / "train.txt", line()))


def test_a_file_that_changed_is_packed_again(tmp_path, cache):
    file = log_at(tmp_path / "train.txt", line())
    read_packed(file)
    log_at(file, line(), line())
    assert 2 == len(read_packed(file))
    assert 1 == len(copies(cache))


@pytest.mark.parametrize("year", [1980, 2100])
def test_a_file_of_another_date_is_packed_again(tmp_path, year):
    """An archive keeps the dates of what is in it; the lines are of one length."""
    file = log_at(tmp_path / "train.txt", line())
    assert [1] == read_packed(file)["label"].tolist()
    log_at(file, line("0"))
    seconds = (year - 1970) * 365 * 86_400
    os.utime(file, (seconds, seconds))
    assert [0] == read_packed(file)["label"].tolist()


def test_a_file_that_did_not_change_is_packed_once(tmp_path, cache):
    file = log_at(tmp_path / "train.txt", line())
    read_packed(file)
    (before,) = copies(cache)
    written = before.stat().st_ino
    read_packed(file)
    assert [written] == [copy.stat().st_ino for copy in copies(cache)]


def test_a_batch_has_the_rows_asked_for_whichever_part_they_are_in():
    parts = [numpy.zeros(3, CLICK), numpy.zeros(0, CLICK), numpy.zeros(4, CLICK)]
    for number, part in zip((0, 0, 3), parts, strict=True):
        part["codes"] = 7 + number + numpy.arange(len(part))[:, None]
        part["label"] = 1
    data = Clicks(parts, table_rows=10)
    numbers, rows, labels = data.__getitems__([6, 0, 3])
    assert [[3] * 26, [7] * 26, [0] * 26] == rows.tolist()
    assert ((3, 13), [1.0, 1.0, 1.0]) == (tuple(numbers.shape), labels.tolist())
    assert [8] * 26 == data[1][1].tolist()
    chosen = Clicks(parts, 10, numpy.array([5, 1]))
    assert 2 == len(chosen)
    assert [[2] * 26, [8] * 26] == chosen.__getitems__([0, 1])[1].tolist()


def test_the_last_of_several_days_is_the_test(tmp_path):
    for day, rows in ((2, 1), (10, 3), (1, 2)):
        log_at(tmp_path / f"day_{day}", *[line()] * rows)
    assert ["day_1", "day_2", "day_10"] == [f.name for f in sort_days(tmp_path.glob("day_*"))]
    train, test = read_criteo(tmp_path, 10)
    assert (3, 3) == (len(train), len(test))


def test_a_day_that_is_there_packed_and_not_is_read_once(tmp_path):
    for day, rows in ((1, 2), (10, 3)):
        log_at(tmp_path / f"day_{day}", *[line()] * rows)
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(b"no click log"))
    train, test = read_criteo(tmp_path, 10)  # else the last day would be trained on too
    assert (2, 3) == (len(train), len(test))


def test_rows_without_the_file_they_were_packed_from_are_one_clear_error(tmp_path):
    (tmp_path / "day_0.packed").touch()
    with pytest.raises(RunError, match=r"has no train.txt or .* itself; put it there again"):
        read_criteo(CRITEO.find(tmp_path), 10)


def test_of_one_file_every_row_is_trained_on_or_tested_and_the_test_is_from_everywhere():
    train, test = split(1000)
    assert list(range(1000)) == sorted([*train, *test])
    assert 100 == len(test)
    assert 0.4 < (test < 500).mean() < 0.6


@needs("criteo")
def test_the_real_rows_are_all_read():
    train, test = read_criteo(CRITEO.find(FOLDER), 1_000)
    assert 22_582 == len(train) + len(test)
    labels = torch.cat([data.__getitems__(range(len(data)))[2] for data in (train, test)])
    assert pytest.approx(0.231, abs=5e-4) == labels.mean().item()
    numbers, rows, _ = train.__getitems__(range(len(train)))
    assert numbers.isfinite().all()
    assert 0 <= rows.min() < rows.max() < 1_000


def test_missing_data_are_one_line(bigbatch, tmp_path):
    status, _, err = bigbatch("train", "dlrm", "--data", tmp_path)
    assert 2 == status
    assert "Criteo's click log is not in" in err
    assert "train.txt" in err
    assert 1 == err.count("\n")


def test_the_published_network_has_its_parameters():
    settings = DLRM_CRITEO.at_scale(paper=True).settings()
    with torch.device("meta"):
        model = DLRM_CRITEO.model(settings)
        logits = model(*DLRM_CRITEO.example(settings, 3)[:2])
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64
    top = (64 + 27 * 26 // 2) * 512 + 512 + 512 * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert bottom + top + 26 * 100_000 * 64 == sum(p.numel() for p in model.parameters())
    assert (3,) == logits.shape


def test_the_network_is_what_its_formula_says():
    torch.manual_seed(0)
    model = DLRM(2, 3, 5, (6, 4), (7, 1)).double()
    numbers, rows = torch.randn(8, 2, dtype=torch.float64), torch.randint(5, (8, 3))
    expected = []
    for number, row in zip(numbers, rows, strict=True):
        x = model.bottom(number)
        vectors = [x, *(table.weight[i] for table, i in zip(model.tables, row, strict=True))]
        pairs = [vectors[a] @ vectors[b] for a in range(4) for b in range(a)]
        expected.append(model.top(torch.cat([x, torch.stack(pairs)])))
    assert torch.allclose(torch.cat(expected), model(numbers, rows))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"top": "8-2"}, "top='8-2' must end in 1"),
        ({"bottom": "8-x"}, "bottom='8-x' must be widths"),
        ({"bottom": "8-0"}, "bottom='8-0' must be widths"),
        ({"table_rows": 0}, "table_rows=0"),
    ],
)
def test_widths_that_cannot_be_are_refused(changes, reason):
    with pytest.raises(SettingError, match=reason):
        DLRM_CRITEO.model(tiny(**changes))


def test_no_model_ranks_the_generated_log_better_than_its_truth():
    log = generate(20_000)
    assert log.rows.tobytes() == generate(20_000).rows.tobytes()
    wins = auc_by_pairs(log.truth, log.rows["label"])
    assert 0.8 < wins < 0.86
    noisy = log.truth + numpy.random.default_rng(1).normal(0, 0.1, len(log.truth))
    assert auc_by_pairs(noisy, log.rows["label"]) < wins
    in_tenths = numpy.digitize(log.truth, numpy.arange(0.1, 1, 0.1))
    for tenth in range(10):
        in_tenth = in_tenths == tenth
        rate, truth = log.rows["label"][in_tenth].mean(), log.truth[in_tenth].mean()
        assert abs(rate - truth) < 4 * (0.25 / in_tenth.sum()) ** 0.5  # four standard errors


def test_a_model_that_diverged_is_scored_as_no_number_and_continues():
    rows = numpy.zeros(9, CLICK)
    rows["label"][::2] = 1

    def diverged(numbers, rows):
        return torch.full((len(numbers),), math.nan)

    settings = DLRM_CRITEO.settings()
    scores = click_scores(diverged, Clicks([rows], 10), settings, "test")
    assert [True, True] == [math.isnan(score) for score in scores.values()]


def auc_by_pairs(scores, labels, most=1_500):
    """Share of (clicked, not clicked) pairs in the right order, ties half: the definition."""
    clicked, others = scores[labels == 1][:most], scores[labels == 0][:most]
    differences = clicked[:, None] - others[None]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)


class FirstNumber(torch.nn.Module):
    """A model whose logit is known."""

    def forward(self, numbers, rows):
        return numbers[:, 0].round(decimals=1)


def scores_on(rank, ranks):
    data = Clicks([generate(501).rows], 50)
    return click_scores(FirstNumber(), data, tiny(), "test")


def test_scores_are_those_of_their_definitions_on_any_number_of_ranks(ranks):
    rows = generate(501).rows
    logits = rows["numbers"][:, 0].round(1)
    loss = functional.binary_cross_entropy_with_logits(
        torch.tensor(logits).double(), torch.tensor(rows["label"]).double()
    )
    expected = {
        "test AUC (test)": pytest.approx(auc_by_pairs(logits, rows["label"])),
        "test loss (test)": pytest.approx(loss.item()),
    }
    assert expected == scores_on(0, 1)
    assert [expected, expected] == ranks(2)(scores_on)


def test_vr_leaves_the_tables_alone_unless_they_are_asked_for():
    for arm, adapted in (("vr-sgd", False), ("vr-sgd-tables", True)):
        training = Training(DLRM_CRITEO, DLRM_CRITEO.arm(arm, tiny()))
        tables = {id(table.weight) for table in training.model.tables}
        of_tables = {
            group.get("vr", True)
            for group in training.optimizer.param_groups
            if tables & {id(p) for p in group["params"]}
        }
        assert {adapted} == of_tables


@pytest.mark.thorough
@pytest.mark.parametrize("vr_arm", ["vr-sgd", "vr-sgd-10"])
def test_a_control_has_its_vr_arms_mean_rate_in_the_networks_and_its_rate_in_the_tables(
    bigbatch, tmp_path, vr_arm
):
    changes = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    changes += ["--set", "samples=512", "--quiet"]
    run = tmp_path / "run"
    assert 0 == bigbatch("train", "dlrm", "--arm", vr_arm, *changes, "--run-dir", run)[0]
    control = DLRM_CRITEO.arm(f"sgd-like-{vr_arm}", tiny(lr=0.5, lr_schedule="constant"))
    training = Training(DLRM_CRITEO, control.with_changes({"lr_control_from": str(run)}))
    found = {
        name: group["lr"]
        for group in training.optimizer.param_groups
        for name in group["param_names"]
    }
    tables = {name for name in found if name.startswith("tables.")}
    steps = [json.loads(row)["gsnr"] for row in (run / "metrics.jsonl").read_text().splitlines()]
    sizes = {name: p.numel() for name, p in training.model.named_parameters()}
    layers = [(r[0], sizes[name]) for row in steps for name, r in row.items() if name not in tables]
    share = sum(r * size for r, size in layers) / sum(size for _, size in layers)
    assert 0.1 < share < (1 if vr_arm == "vr-sgd" else 2)
    assert 26 == len(tables)
    assert {0.5} == {found[name] for name in tables}
    assert [pytest.approx(0.5 * share)] * (len(found) - 26) == [
        lr for name, lr in found.items() if name not in tables
    ]


def train_some(rank, ranks):
    settings = DLRM_CRITEO.arm("vr-sgd-tables", tiny(batch_size=64, micro_batch=8, lr=0.5))
    training = Training(DLRM_CRITEO, settings)
    before = training.model.tables[0].weight.tolist()
    for _, step in zip(range(3), training.train, strict=False):
        for batch in step:
            step.backward(training.loss_of(training.wrapped_model, batch))
        step.update()
    assert before != training.model.tables[0].weight.tolist()
    return [p.tolist() for p in training.model.parameters()], training.train.samples


def test_two_ranks_train_the_same_weights(ranks):
    (weights, samples), (others, _) = ranks(2)(train_some)
    assert 3 * 64 == samples
    assert weights == others


@pytest.mark.thorough
@needs("criteo")
def test_a_training_on_real_rows_learns(bigbatch, tmp_path):
    arguments = ("--arm", "sgd", "--set", "samples=6000", "--set", "micro_batch=256")
    run = tmp_path / "run"
    assert 0 == bigbatch("train", "dlrm", "--data", FOLDER, *arguments, "--run-dir", run)[0]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert 6000 == last["samples"]
    assert (
        last["metrics"]["test AUC (of 22,582 Criteo rows)"] > 0.58
    )  # half is chance; measured .64


def test_the_generated_log_says_so_at_every_score(bigbatch, tmp_path):
    changes = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
    run = tmp_path / "run"
    status, _, err = bigbatch("train", "dlrm", "--arm", "vr-sgd", *changes, "--run-dir", run)
    assert 0 == status
    assert "no --data; a generated click log is used" in err
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert 3 == len(last["metrics"])
    assert all("generated log" in name for name in last["metrics"])
    assert last["metrics"]["best reachable AUC (generated log)"] > 0.75


@pytest.mark.release
@needs("criteo")
def test_two_ranks_under_torchrun_draw_the_curve_of_one(tmp_path):
    options = ["train", "dlrm", "--data", FOLDER, "--arm", "vr-sgd", "--set", "samples=2048"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name, start in (("one", []), ("two", launcher)):
        command = [sys.executable, *start, "-m", "bigbatch", *options, "--run-dir", tmp_path / name]
        subprocess.run([*map(str, command)], check=True, timeout=240)
    one, two = (
        [json.loads(row) for row in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [row["samples"] for row in one] == [row["samples"] for row in two]
    losses = [row["loss"] for row in one]
    assert pytest.approx(losses, rel=1e-3) == [row["loss"] for row in two]
    assert pytest.approx(one[-1]["metrics"], rel=1e-3) == two[-1]["metrics"]
