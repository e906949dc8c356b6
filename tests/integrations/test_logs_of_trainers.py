"""The log of a training by another library's trainer: a row per step, and the scores it knows."""

import pytest
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

import bigbatch as bb
from bigbatch.errors import RunError, SettingError
from bigbatch.integrations.accelerate import adaptive_batch
from bigbatch.integrations.transformers import AdaptiveTrainer
from bigbatch.log.history import history_of
from deepspeed_training import BATCH, PARAMS, engine_of, train_steps
from lightning_training import Scripted, Training, adaptive, fit, loader, network, sgd
from tiny_trainer import arguments, gpt, texts

GROWING = Scripted(8, 8, 16, 24)
FIRST = {"batch_size": 8, "min_micro_batches": 2}


class Validated(Training):
    """A module that logs in training too, which is no score."""

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).double().mean())


class WithValidation(Validated):
    def val_dataloader(self):
        return loader(16)


def sizes_in(path):
    return [row["batch_size"] for row in history_of(path).rows]


def test_lightning_writes_each_step_and_what_a_validation_logs(tmp_path):
    callback = adaptive(GROWING, **FIRST, log=tmp_path / "run")
    watch = fit(callback, loader(56), WithValidation(), max_epochs=2)
    rows = history_of(tmp_path / "run").rows
    assert [record["batch_size"] for record in watch.records] == [row["batch_size"] for row in rows]
    scored = [row for row in rows if row["metrics"] is not None]
    ends = [rows[i] for i, row in enumerate(rows[1:]) if row["epoch"] == 1 > rows[i]["epoch"]]
    assert [*ends, rows[-1]] == scored
    assert all({"val_accuracy"} == row["metrics"].keys() for row in scored)
    assert float(watch.trainer.callback_metrics["val_accuracy"]) == scored[-1]["metrics"].get(
        "val_accuracy"
    )


def test_lightning_continues_the_log_of_its_checkpoint(tmp_path):
    def trained(epochs, **options):
        return fit(adaptive(GROWING, **FIRST, log=tmp_path / "run"), loader(56), **options)

    trained(1).trainer.save_checkpoint(tmp_path / "saved.ckpt")
    first = sizes_in(tmp_path / "run")
    with pytest.raises(RunError, match="load the checkpoint to continue"):
        trained(2, max_epochs=2)
    trained(2, max_epochs=2, ckpt_path=tmp_path / "saved.ckpt")
    both = sizes_in(tmp_path / "run")
    assert first == both[: len(first)]
    assert 112 == sum(both)


def test_the_trainer_writes_each_update_and_its_evaluations(tmp_path):
    log = bb.RunLog(tmp_path / "run", settings={"seed": 3}, higher_is_better=False)
    trainer = AdaptiveTrainer(
        model=gpt(),
        args=arguments(tmp_path / "out", eval_strategy="epoch"),
        train_dataset=texts(),
        eval_dataset=texts(8),
        compute_metrics=lambda _: {"by_class": [0.5, 0.25], "name": "a model"},  # no numbers
        policy=GROWING,
        every=1,
        log=log,
        **FIRST,
    )
    trainer.train()
    history = history_of(tmp_path / "run")
    assert 128 == sum(row["batch_size"] for row in history.rows)
    expected = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert expected == [row["metrics"]["eval_loss"] for row in history.scored_rows]
    assert {"eval_loss"} == history.rows[-1]["metrics"].keys()
    assert (3, False) == (history.settings["seed"], history.higher_is_better)


def test_accelerate_writes_each_step(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer, batches = accelerator.prepare(model, sgd(model.parameters()), loader(56))
    options = {**FIRST, "every": 1, "log": tmp_path / "run"}
    train = adaptive_batch(accelerator, model, optimizer, batches, policy=GROWING, **options)
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        step.update()
    assert [8, 8, 16, 24] == sizes_in(tmp_path / "run")


def on_deepspeed(rank, ranks, path):
    engine, _, batches, _ = engine_of(rank, ranks, log=path)
    return [record.batch_size for record in train_steps(engine, batches, 3)]


def test_deepspeed_writes_each_step_on_rank_0(deepspeed_ranks, tmp_path):
    sizes = deepspeed_ranks(2)(on_deepspeed, tmp_path / "run")
    assert sizes[0] == sizes[1] == sizes_in(tmp_path / "run")
    assert 2 == history_of(tmp_path / "run").settings["world_size"]


def unadapted(rank, ranks, path):
    with pytest.raises(SettingError, match=r"log= needs an adaptive engine"):
        engine_of(rank, ranks, adaptive_batch_params={**PARAMS, "enable_adjust": False}, log=path)
    given = {"adaptive_batch_params": None, "policy": bb.Fixed(BATCH), "log": path}
    engine, _, batches, _ = engine_of(rank, ranks, **given)
    train_steps(engine, batches, 1)


def test_an_engine_that_is_deepspeeds_own_has_no_log(deepspeed_ranks, tmp_path):
    deepspeed_ranks(1)(unadapted, tmp_path / "run")
    assert [BATCH] == sizes_in(tmp_path / "run")
