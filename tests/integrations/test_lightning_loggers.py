"""What reaches a trainer's loggers, read back from where they wrote it."""

import csv
import json
import math
import struct
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

import bigbatch as bb
from lightning_training import Scripted, Training, adaptive, fit, loader

NAMES = {
    "bigbatch/batch_size": "batch_size",
    "bigbatch/similarity": "similarity",
    "bigbatch/noise_scale": "noise_scale",
    "bigbatch/loss": "loss",
    "bigbatch/lr": "lr",
}
GROWING = Scripted(8, 8, 16, 24)


def train(logger, **options):
    """Four steps of 2, 2, 4 and 6 micro-batches."""
    options = {"log_every_n_steps": 1, "logger": logger, **options}
    return fit(adaptive(GROWING, batch_size=8, min_micro_batches=2), loader(56), **options)


def expected_of(watch, name):
    """(step, value) of what is finite, numbered as Lightning numbers its own metrics."""
    values = enumerate(record[NAMES[name]] for record in watch.records)
    return [(step, value) for step, value in values if math.isfinite(value)]


@pytest.mark.parametrize("name", NAMES)
def test_tensorboard_has_every_step(name, tmp_path):
    logger = TensorBoardLogger(tmp_path)

    watch = train(logger)

    events = EventAccumulator(logger.log_dir).Reload()
    written = [(event.step, event.value) for event in events.Scalars(name)]
    expected = expected_of(watch, name)
    assert [step for step, _ in expected] == [step for step, _ in written]
    assert [value for _, value in expected] == pytest.approx([value for _, value in written])


def test_steps_are_numbered_as_lightnings_own_metrics(tmp_path):
    class Logging(Training):
        def training_step(self, batch, number):
            self.log("own", float(number))
            return super().training_step(batch, number)

    logger = TensorBoardLogger(tmp_path)
    fit(
        adaptive(GROWING, batch_size=8, min_micro_batches=2),
        loader(56),
        Logging(),
        logger=logger,
        log_every_n_steps=2,
    )

    events = EventAccumulator(logger.log_dir).Reload()
    own = [event.step for event in events.Scalars("own")]
    assert [1, 3] == own == [event.step for event in events.Scalars("bigbatch/batch_size")]


def test_mlflow_has_every_step(trackers, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=(tmp_path / "runs").as_uri())

    watch = train(logger)

    history = logger.experiment.get_metric_history(logger.run_id, "bigbatch/batch_size")
    written = [(metric.step, metric.value) for metric in history]
    assert expected_of(watch, "bigbatch/batch_size") == sorted(written)


@pytest.mark.thorough
def test_wandb_has_every_step_offline(trackers, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)

    watch = train(logger)
    wandb.finish()  # waits for the process that writes

    (written,) = tmp_path.rglob("*.wandb")
    rows = rows_of(written, len(watch.records))
    for name in NAMES:
        found = [(row["trainer/global_step"], row[name]) for row in rows if name in row]
        assert expected_of(watch, name) == found


def rows_of(path, steps):
    """The rows, once each step has one: on a busy machine the process that writes ends late."""
    deadline = time.monotonic() + 60
    while True:
        rows = list(history(path))
        if (
            sum("bigbatch/batch_size" in row for row in rows) >= steps
            or time.monotonic() > deadline
        ):
            return rows
        time.sleep(0.2)


def history(path):
    """The rows of a run that was not uploaded."""
    for data in entries(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.history.item:
            yield {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }


def entries(content):
    """Of a LevelDB log: blocks of 32 KiB, in them chunks with checksum, length and kind."""
    place, entry, block = 7, b"", 2**15  # after what says that it is W&B's
    while place + 7 <= len(content):
        if block - place % block < 7:  # no room for another head
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if place + 7 + length > len(content):
            return  # not written to its end yet
        entry += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield entry
            entry = b""


class Broken(DummyLogger):
    """Fails whatever it is asked to log."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def log_metrics(self, *_, **__):
        self.asked += 1
        raise OSError("no space left on device")


def test_a_logger_that_fails_is_left_out_and_stops_nothing(tmp_path):
    broken, whole = Broken(), CSVLogger(tmp_path)

    with pytest.warns(UserWarning, match="Broken could not log .*no space left") as warned:
        watch = train([broken, whole])

    assert 4 == len(watch.records)
    assert 1 == broken.asked
    assert 1 == sum("could not log" in str(warning.message) for warning in warned)
    with (Path(whole.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert ["8.0", "8.0", "16.0", "24.0"] == [row["bigbatch/batch_size"] for row in rows]


@pytest.mark.parametrize("every", [0, 3])
def test_log_every_n_steps_holds(every, tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=100)
    asked = []
    logger.log_metrics = lambda metrics, step=None: asked.append(step)

    train(logger, log_every_n_steps=every)

    assert ([2] if every else []) == asked


def test_what_was_not_measured_is_not_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    callback = adaptive(bb.Fixed(8), min_micro_batches=2, every=2)

    fit(callback, loader(32), logger=logger, log_every_n_steps=1)

    events = EventAccumulator(logger.log_dir).Reload()
    assert [0, 2] == [event.step for event in events.Scalars("bigbatch/similarity")]
    assert [0, 1, 2, 3] == [event.step for event in events.Scalars("bigbatch/batch_size")]


def test_a_log_has_the_last_measurement_since_the_log_before(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    callback = adaptive(bb.Fixed(8), min_micro_batches=2, every=3)

    fit(callback, loader(96), logger=logger, log_every_n_steps=2)

    events = EventAccumulator(logger.log_dir).Reload()
    # of steps 0, 3, 6 and 9
    assert [1, 3, 7, 9] == [event.step for event in events.Scalars("bigbatch/similarity")]
    assert [1, 3, 5, 7, 9, 11] == [event.step for event in events.Scalars("bigbatch/batch_size")]


def test_a_trainer_without_loggers_trains():
    trainer = train(False).trainer
    assert isinstance(trainer, pl.Trainer)
    assert [] == trainer.loggers
