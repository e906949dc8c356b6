"""What AdaptiveTrainer refuses when it is made, and what a failing reporter may not do."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.optimization import GreedyLR

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.integrations.transformers import AdaptiveTrainer
from tiny_trainer import arguments, gpt, logged, texts


def build(folder, args=None, **others):
    return AdaptiveTrainer(
        model=others.pop("model", None) or gpt(),
        args=args or arguments(folder),
        train_dataset=texts(),
        policy=bb.Fixed(16),
        **others,
    )


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"gradient_accumulation_steps": 4}, "leave it at 1"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"ignore_data_skip": True}, "the remaining samples"),
        ({"optim": "lomo"}, "adamw_torch"),
        ({"optim": "galore_adamw_layerwise"}, "adamw_torch"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "linear"),
        ({"lr_scheduler_type": "greedy"}, "linear"),
        ({"enable_jit_checkpoint": True}, "save_steps"),
        ({"train_sampling_strategy": "batch_rebalance"}, "group_by_length"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_setting_that_cannot_work_is_refused_with_its_remedy(tmp_path, settings, remedy):
    args = arguments(tmp_path)
    for name, value in settings.items():
        setattr(args, name, value)  # some ask for packages or metrics of their own first
    with pytest.raises(SettingError, match=next(iter(settings))) as caught:
        build(tmp_path, args)
    assert remedy in str(caught.value)


def test_accumulation_in_accelerates_configuration_is_refused(tmp_path):
    accumulating = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    args = arguments(tmp_path, accelerator_config=accumulating)
    with pytest.raises(SettingError, match=r"gradient_accumulation_steps=4.*leave it at 1"):
        build(tmp_path, args)


def test_fsdp1_is_refused(tmp_path):
    args = arguments(tmp_path)
    args.fsdp, args.fsdp_config = True, {"version": 1}
    with pytest.raises(SettingError, match=r"fsdp_config\['version'\]=1.*set it to 2"):
        build(tmp_path, args)


def test_several_gpus_in_one_process_are_refused(tmp_path):
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(SettingError, match=r"2 GPUs in one process.*torchrun"):
        build(tmp_path, args)


def test_sagemakers_model_parallelism_is_refused(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    (tmp_path / "smdistributed").mkdir()
    (tmp_path / "smdistributed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2}')
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_mpi_enabled": true}')
    with pytest.raises(SettingError, match="SageMaker"):
        build(tmp_path, args)


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR])
def test_a_scheduler_that_follows_a_metric_is_refused(tmp_path, kind):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(SettingError, match=rf"{kind.__name__}.*follows a metric"):
        build(tmp_path, model=model, optimizers=(optimizer, kind(optimizer)))


# reporters

NAMES = {"batch_size", "similarity", "learning_rate", "loss", "samples"}


def test_tensorboard_shows_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = build(tmp_path, arguments(tmp_path, report_to="tensorboard"))
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {f"train/{name}" for name in NAMES} <= set(events.Tags()["scalars"])
    sizes = [(event.value,) for event in events.Scalars("train/batch_size")]
    assert logged(trainer, "batch_size") == sizes


def test_mlflow_shows_what_was_measured(trackers, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "bigbatch")
    trainer = build(tmp_path, arguments(tmp_path, report_to="mlflow"))
    trainer.train()
    client = mlflow.MlflowClient((tmp_path / "runs").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'bigbatch'")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "batch_size")
    assert logged(trainer, "batch_size") == [(metric.value,) for metric in history]
    assert set(run.data.metrics) >= NAMES


def test_wandb_is_given_what_was_measured(trackers, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = build(tmp_path, arguments(tmp_path, report_to="wandb"))
    trainer.train()
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert {f"train/{name}" for name in NAMES} <= set(summary)
    assert 16 == summary["train/batch_size"]
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class Broken(TensorBoardCallback):
    """A reporter whose server is gone."""

    def on_log(self, *args, **others):
        raise ConnectionError("nobody answers")


def test_a_reporter_that_fails_is_said_once_and_stops_no_training(tmp_path):
    trainer = build(tmp_path)
    trainer.add_callback(Broken())
    with pytest.warns(UserWarning, match=r"Broken\.on_log failed.*nobody answers") as caught:
        trainer.train()
    assert 8 == trainer.state.global_step
    assert 1 == sum("Broken" in str(warning.message) for warning in caught)


def test_a_callback_that_is_no_reporter_may_stop_it(tmp_path):
    class Strict(TrainerCallback):
        def on_log(self, *args, **others):
            raise ValueError("no")

    trainer = build(tmp_path)
    trainer.add_callback(Strict())
    with pytest.raises(ValueError, match="no"):
        trainer.train()
    assert 1 == trainer.state.global_step
