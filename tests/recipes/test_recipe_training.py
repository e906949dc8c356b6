"""A recipe's training: the rate, clipping, types and parts of data that its settings ask for."""

import itertools
import json
import math
import shutil
import weakref
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import RunError, SettingError
from bigbatch.log.history import history_of
from bigbatch.log.row_schema import finite, require_step, row_of
from bigbatch.policies.amounts import Amount
from bigbatch_recipes.datasets.files import DatasetLocation
from bigbatch_recipes.datasets.in_memory import InMemoryDataset, chosen_indices
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.distributed_eval import accuracy_and_loss, finite_scores
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.train_run import Training, ends_in_step

FIXED = {"policy": "fixed", "batch_size": 64, "epochs": 1}


def trained(recipe=DIGITS, **changes):
    """A training of one epoch, and the rate of each step."""
    training = Training(recipe, recipe.settings().with_changes({**FIXED, **changes}))
    rates = []
    for _ in training.train.epochs(1):
        for step in training.train:
            for batch in step:
                step.backward(training.loss_of(training.wrapped_model, batch))
            rates += step.update().lr
    return training, rates


def test_the_rate_follows_the_schedule_over_base_batches():
    _, rates = trained(lr_schedule="polynomial 1", lr_scaling="none")
    total = 1347
    seen = [64 * step // 32 * 32 + 16 for step in range(len(rates))]  # the middle of a base batch
    assert pytest.approx([0.02 * (1 - place / total) for place in seen]) == rates


def rows_of_one_epoch(**changes):
    """The log of one epoch of 200 samples."""
    own = {"samples": 200, "every": 1, "micro_batch": 8, "target": 0.9, "optimizer": "sgd"}
    training = Training(DIGITS, DIGITS.settings().with_changes({**own, **changes}))
    rows = map(row_of, training.steps())
    return [{name: finite(value) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize(
    ("changes", "has_effect"),
    [
        ({"min_micro_batches": 6}, lambda row: row["micro_batches"] >= 6),
        ({"fixed_micro_batch": True}, lambda row: row["batch_size"] == 8 * row["micro_batches"]),
        ({"every": 3}, lambda row: (row["grad_sqnorm"] is None) == (row["step"] % 3 != 1)),
        ({"max_change": 1.02}, lambda row: "at most x1.02 a decision" in row["decision_reason"]),
    ],
)
def test_a_setting_of_the_loop_has_its_effect_in_every_step(changes, has_effect):
    effects = [has_effect(row) for row in rows_of_one_epoch(**changes)]
    assert len(effects) > 3
    assert all(effects[:-1])  # the end of an epoch has the samples that are left
    assert not all(has_effect(row) for row in rows_of_one_epoch()[:-1])


@pytest.mark.parametrize(("policy", "is_limited"), [("noise-scale", True), ("simigrad", False)])
def test_the_largest_change_may_be_the_policys_own(policy, is_limited):
    own = {"policy": policy, "smoothing": "auto", "batch_size": 16, "micro_batch": 4}
    rows = rows_of_one_epoch(**own, max_change="auto")
    assert is_limited == any("at most x1.1 a decision" in row["decision_reason"] for row in rows)


def test_the_log_has_what_more_is_measured_of_a_step_and_of_each_layer():
    more = {"half_batch_cosine": True, "per_layer": True, "every": 2}
    rows = json.loads(json.dumps(rows_of_one_epoch(**more)))
    for previous, row in itertools.pairwise([None, *rows]):
        require_step("a row", row, previous)
        measured = row["grad_sqnorm"] is not None
        assert (measured, measured) == ("half_batch_cosine" in row, "layers" in row)
    assert {"0", "2", "6", "9"} == rows[0]["layers"].keys()  # the modules with parameters
    assert -1 < rows[0]["half_batch_cosine"] < 1
    for scale, similarity in rows[0]["layers"].values():
        assert scale is None or math.isclose(
            similarity, 1 / (1 + 2 * scale / rows[0]["batch_size"]), rel_tol=1e-3
        )
    assert any(scale is not None for scale, _ in rows[0]["layers"].values())
    plain = rows_of_one_epoch(every=2)
    assert not any({"half_batch_cosine", "layers"} & row.keys() for row in plain)
    assert not any("similarity_interval" in row for row in [*rows, *plain])
    assert [row["loss"] for row in plain] == [row["loss"] for row in rows]


@pytest.mark.parametrize("text", ["warm-up 1348 samples; cosine", "x0.1 at 2 epochs"])
def test_a_schedule_that_the_training_does_not_reach_is_said(text):
    with pytest.warns(UserWarning, match=r"continues for .* and the training ends after 1,347"):
        Training(DIGITS, DIGITS.settings().with_changes({**FIXED, "lr_schedule": text}))


@pytest.mark.parametrize("text", ["warm-up 1347 samples; cosine", "x0.1 at 1 epochs"])
def test_a_schedule_that_fits_is_not_spoken_of(text, recwarn):
    Training(DIGITS, DIGITS.settings().with_changes({**FIXED, "lr_schedule": text}))
    assert [] == [one for one in recwarn if "lr_schedule" in str(one.message)]


def images_of(training):
    """The samples of one more epoch, in their order."""
    seen = []
    for _ in training.train.epochs(2):
        for step in training.train:
            for x, y in step:
                seen += [tuple(one.flatten().tolist()) for one in x]
                step.backward(training.loss_of(training.wrapped_model, (x, y)))
            step.update()
    return seen


def test_a_part_of_the_data_is_the_same_for_every_seed():
    (one, _), (other, _) = trained(samples=100), trained(samples=100, seed=1)
    orders = [images_of(training) for training in (one, other)]
    assert [100, 100] == [len(order) for order in orders]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_more_samples_than_there_are_is_all_of_them():
    training, _ = trained(samples=10_000)
    assert 1347 == training.train.samples


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def train(bigbatch, place, *options):
    first = ("epochs=2", "policy=fixed", "batch_size=64", "lr=0.1")
    settings = [f"--set={option}" for option in (*first, *options)]
    status, out, err = bigbatch(
        "train", "digits", "--seed=0", *settings, "--run-dir", place, "--quiet"
    )
    assert 0 == status, out + err
    return rows(place)


@pytest.mark.thorough
def test_a_clipped_training_is_another(bigbatch, tmp_path):
    plain = train(bigbatch, tmp_path / "plain")
    loose = train(bigbatch, tmp_path / "loose", "clip=1e6")
    tight = train(bigbatch, tmp_path / "tight", "clip=1e-3")
    assert pytest.approx(plain[-1]["loss"]) == loose[-1]["loss"]
    assert plain[-1]["loss"] < 1.5
    assert abs(tight[-1]["loss"] - math.log(10)) < 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_training_in_half_precision_is_that_of_float32_but_for_rounding(
    bigbatch, tmp_path, precision
):
    small = ("epochs=1", "samples=256")
    whole = train(bigbatch, tmp_path / "whole", *small)
    half = train(bigbatch, tmp_path / "half", *small, f"precision={precision}")
    losses, rounded = ([row["loss"] for row in rows] for rows in (whole, half))
    assert pytest.approx(losses, rel=0.02) == rounded
    assert losses != rounded
    saved = torch.load(tmp_path / "half" / "checkpoint.pt", weights_only=True)["state"]
    assert (precision == "float16") == (saved["scaler"] is not None)


def test_a_precision_that_a_model_in_float64_would_not_have_is_refused():
    with pytest.raises(
        SettingError, match="precision=bfloat16 has no effect on a model in float64"
    ):
        Training(DIGITS, DIGITS.settings().with_changes({"precision": "bfloat16", "double": True}))


def test_indices_of_a_part_take_few_bytes():
    """Four each, and not the forty of a list of numbers; datasets get Python's own."""
    chosen = chosen_indices(400_000, 300_000)
    bytes_of_indices = chosen.buffer_info()[1] * chosen.itemsize
    assert 300_000 * 4 == bytes_of_indices
    assert 300_000 == len(set(chosen))
    assert int is type(chosen[0])


@pytest.mark.thorough
def test_data_from_workers_is_the_same_training(bigbatch, tmp_path):
    alone = train(bigbatch, tmp_path / "a", "epochs=1")
    workers = train(bigbatch, tmp_path / "b", "epochs=1", "workers=2")
    assert [row["loss"] for row in alone] == [row["loss"] for row in workers]


def test_measuring_scores_draws_no_random_number():
    training, _ = trained()
    before = torch.get_rng_state()
    training.scores()
    assert torch.equal(before, torch.get_rng_state())


def test_a_gpu_that_is_not_there_is_said():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingError, match="device='cuda' is not there; write --set device=cpu"):
        Training(DIGITS, DIGITS.settings().with_changes({"device": "cuda"}))


# beginning from another run


def test_a_run_begins_with_the_weights_of_another(bigbatch, tmp_path):
    train(bigbatch, tmp_path / "first")
    changes = {**FIXED, "init_from": str(tmp_path / "first")}
    second = Training(DIGITS, DIGITS.settings().with_changes(changes))
    saved = torch.load(tmp_path / "first" / "checkpoint.pt", weights_only=True)["state"]["model"]
    assert all(torch.equal(saved[name], now) for name, now in second.model.state_dict().items())


@pytest.mark.thorough
def test_weights_of_another_shape_start_again_which_is_said(bigbatch, tmp_path):
    train(bigbatch, tmp_path / "first")

    def wider(settings):
        model = DIGITS.model(settings)
        model[9] = torch.nn.Linear(128, 12)
        return model

    changes = {**FIXED, "init_from": str(tmp_path / "first")}
    recipe = replace(DIGITS, model=wider)
    with pytest.warns(UserWarning, match=r"6 of 8 tensors begin as .* new are 9.bias, 9.weight"):
        Training(recipe, DIGITS.settings().with_changes(changes))


@pytest.mark.thorough
def test_a_run_that_cannot_be_begun_from_is_refused(tmp_path, bigbatch):
    with pytest.raises(RunError, match="there is no run directory"):
        trained(init_from=str(tmp_path / "nowhere"))
    train(bigbatch, tmp_path / "first")
    recipe = replace(DIGITS, model=lambda settings: torch.nn.Linear(3, 3))
    with pytest.raises(RunError, match=r"no weight of .* fits this model"):
        trained(recipe, init_from=str(tmp_path / "first"))
    with (tmp_path / "first" / "metrics.jsonl").open("r+") as log:
        whole = log.read()
        log.truncate(whole.index("\n"))
    with pytest.raises(RunError, match="is not finished, so nothing can begin from it"):
        trained(init_from=str(tmp_path / "first"))
    (tmp_path / "first" / "metrics.jsonl").write_text(whole)
    (tmp_path / "first" / "checkpoint.pt").unlink()
    with pytest.raises(RunError, match="has no checkpoint to begin from; train it first"):
        trained(init_from=str(tmp_path / "first"))


@pytest.mark.thorough
def test_a_run_continues_where_those_that_it_needed_first_are_gone(bigbatch, tmp_path, monkeypatch):
    first = tmp_path / "first"
    train(bigbatch, first, "optimizer=vr-momentum")
    needed = ("lr_schedule=cosine", f"init_from={first}", f"lr_control_from={first}")
    whole = train(bigbatch, tmp_path / "whole", *needed)
    calls = itertools.count()

    def interrupted(settings):
        loss_of = DIGITS.loss(settings)

        def loss(model, batch):
            if next(calls) == 100:
                raise KeyboardInterrupt
            return loss_of(model, batch)

        return loss

    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, loss=interrupted))
    with pytest.raises(AssertionError, match="bigbatch train --resume"):
        train(bigbatch, tmp_path / "half", *needed, "checkpoint_every=5 steps")
    shutil.rmtree(first)
    assert 0 == bigbatch("train", "--resume", tmp_path / "half")[0]
    for expected, actual in zip(whole, rows(tmp_path / "half"), strict=True):
        assert {**expected, "elapsed_seconds": None} == {**actual, "elapsed_seconds": None}


@pytest.mark.thorough
def test_an_arm_begins_from_an_earlier_one_of_its_study_and_seed(bigbatch, tmp_path, monkeypatch):
    def data(settings):
        return replace(DIGITS.data(settings), run_files={"words.txt": settings.init_from})

    arms = {"one": FIXED, "two": {**FIXED, "lr": 0.0, "init_from": "one"}}
    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, arms=arms, data=data))
    study = tmp_path / "study"
    few = ("--epochs=1", "--seeds=2", "--set", "samples=100")
    status, out, err = bigbatch("train", "digits", *few, "--run-dir", study)
    assert 0 == status, out + err
    for seed in (0, 1):
        first, second = (rows(study / f"{arm}-seed{seed}") for arm in arms)
        assert first[-1]["metrics"] == second[-1]["metrics"]  # the rate is 0
        kept = (study / f"two-seed{seed}" / "words.txt").read_text()
        assert str((study / f"one-seed{seed}").resolve()) == kept
    assert "2 seeds" in out
    study.rename(tmp_path / "moved")
    (tmp_path / "moved" / "two-seed1" / "checkpoint.pt").unlink()
    assert 0 == bigbatch("train", "--resume", tmp_path / "moved")[0]


@pytest.mark.thorough
def test_a_study_holds_one_model_at_a_time(bigbatch, tmp_path, monkeypatch):
    made, alive = [], []

    def model(settings):
        alive.append(sum(one() is not None for one in made))
        network = DIGITS.model(settings)
        made.append(weakref.ref(network))
        return network

    arms = {"one": FIXED, "two": FIXED, "three": FIXED}
    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, arms=arms, model=model))
    own = ("--epochs=1", "--seeds=1", "--set=samples=64")
    assert 0 == bigbatch("train", "digits", *own, "--run-dir", tmp_path / "study")[0]
    assert {0} == set(alive)


# data


def test_data_are_found_in_the_folder_or_in_a_named_one_of_it(tmp_path):
    origin = DatasetLocation(
        "letters", ("letters", "abc"), ("*.txt",), "the alphabet", otherwise=""
    )
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "a.txt").write_text("a")
    assert (tmp_path / "abc").resolve() == origin.find(tmp_path)
    assert (tmp_path / "abc").resolve() == origin.find(tmp_path / "abc")


def test_missing_data_are_one_line_that_says_which_files_from_where(tmp_path, monkeypatch):
    origin = DatasetLocation("letters", ("abc",), ("*.txt",), "the alphabet (alphabet.org)")
    wanted = r"letters is not in .*: \*.txt of the alphabet \(alphabet.org\) must be there, or in a"
    with pytest.raises(RunError, match=wanted):
        origin.find(tmp_path)
    with pytest.raises(RunError, match=r"\*.txt, and a key, and a lock of the alphabet"):
        replace(origin, other_files=("a key", "a lock")).find(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="letters is not in data"):
        origin.find(None)
    assert replace(origin, otherwise="numbers").find(None) is None
    (tmp_path / "data" / "abc").mkdir(parents=True)
    (tmp_path / "data" / "abc" / "a.txt").write_text("a")
    assert (tmp_path / "data" / "abc").resolve() == origin.find(None)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(AssertionError, match="Size mismatch between tensors"):
        InMemoryDataset(torch.ones(2), torch.ones(3))


# ranks


def judged(rank, ranks, samples):
    """Accuracy of a model that is right on every third of so many samples."""
    x = torch.arange(samples)
    data = InMemoryDataset(torch.nn.functional.one_hot((x % 3 == 0).long(), 2).double(), x * 0 + 1)
    settings = DIGITS.settings().with_changes({"micro_batch": 4})
    return accuracy_and_loss(torch.nn.Identity(), data, settings)[0]


@pytest.mark.parametrize("samples", [1, 7, 30])
def test_ranks_share_the_samples_and_all_get_the_same_score(ranks, samples):
    expected = 100 * len(range(0, samples, 3)) / samples
    assert expected == judged(0, 1, samples)
    assert [expected] * 2 == ranks(2)(judged, samples)


def judged_strange(rank, ranks, logit):
    """Scores of a model that gives one odd logit, for a sample of the last rank."""
    x = torch.eye(4)
    x[3, 3] = logit
    data = InMemoryDataset(x, torch.zeros(4, dtype=torch.long))
    settings = DIGITS.settings().with_changes({"micro_batch": 4})

    def scores(model):
        return {"right": accuracy_and_loss(model, data, settings)[0]}

    return finite_scores(torch.nn.Identity(), scores, torch.device("cpu"))


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_model_with_an_output_that_is_no_number_has_no_score(ranks, logit):
    assert {"right": 25.0} == judged_strange(0, 1, 1.0)
    for found in [judged_strange(0, 1, logit), *ranks(2)(judged_strange, logit)]:
        assert math.isnan(found["right"])


OWN_POLICY = """
import bigbatch as bb


class Doubling:
    def __init__(self, every):
        self.every = every

    def decide(self, statistics, now):
        return bb.Decision(batch_size=32 << now.samples // self.every, reason="more")
"""


def test_a_policy_of_ones_own_trains_and_resumes_from_another_folder(
    bigbatch, tmp_path, monkeypatch
):
    (tmp_path / "doubling.py").write_text(OWN_POLICY)
    monkeypatch.chdir(tmp_path)
    options = ("--policy", "doubling.py:Doubling:every=400", "--epochs", "1")
    status, _, err = bigbatch("train", "digits", *options, "--quiet")
    assert (0, "") == (status, err)
    run = tmp_path / "runs" / "digits-Doubling-momentum-1"
    sizes = [row["batch_size"] for row in history_of(run).rows]
    assert {32, 64, 128} <= set(sizes)
    monkeypatch.chdir(tmp_path / "runs")
    assert 0 == bigbatch("train", "--resume", run, "--quiet")[0]
    status, _, err = bigbatch("train", "digits", "--policy", "simigrad:target=0.3")
    assert (2, 1) == (status, err.count("\n"))
    assert "has arguments, which are settings here: write policy=simigrad, and target" in err


def test_a_sweep_compares_a_policy_of_ones_own(bigbatch, tmp_path, monkeypatch):
    (tmp_path / "doubling.py").write_text(OWN_POLICY)
    monkeypatch.chdir(tmp_path)
    grid = ("--grid", "policy=fixed|doubling.py:Doubling:every=400", "--seeds", "1")
    status, out, _ = bigbatch("sweep", "digits", *grid, "--set", "epochs=1", "--jobs", "1")
    assert 0 == status
    assert "policy=Doubling-seed0  test accuracy " in out


@given(
    count=st.fractions(Fraction(1, 20), 20, max_denominator=20),
    unit=st.sampled_from(["step", "sample", "epoch"]),
    batches=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    epoch=st.integers(1, 100),
)
def test_each_multiple_ends_in_the_step_that_reaches_it(count, unit, batches, epoch):
    """A step may reach several multiples; the end of the whole is counted by the last sample."""
    amount = Amount(count if unit == "epoch" else Fraction(max(1, round(count))), unit)
    size = {"step": None, "sample": amount.count, "epoch": amount.count * epoch}[unit]
    samples, reached = 0, 0
    for step, batch in enumerate(batches, start=1):
        samples += batch
        now = step // amount.count if size is None else samples // size
        assert (now > reached) == ends_in_step(amount, step, samples, batch, epoch)
        reached = now
