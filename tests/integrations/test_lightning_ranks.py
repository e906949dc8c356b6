"""AdaptiveBatchCallback on real ranks: under DDP, and sharded by ModelParallelStrategy."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import bigbatch as bb
from bigbatch.errors import SettingError
from bigbatch.optim import VRAdam
from lightning_training import (
    MICRO,
    SEED,
    Narrow,
    Scripted,
    Training,
    adaptive,
    data,
    fit,
    loader,
    network,
    plain_loop,
    sgd,
)

GROWING = bb.SimiGrad(target=0.5, min_batch=16, max_batch=96, grow=1.5)


def vradam(parameters):
    return VRAdam(parameters, lr=0.01, beta3=0.9)


def strategy_of(engine, ranks):
    if engine == "ddp":
        return "ddp"
    return ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False
    )


def trained(rank, ranks, engine, optimizer, settings, samples, clip=None):
    """What one rank watched of a Lightning training."""
    warnings.simplefilter("ignore")
    watch = fit(
        adaptive(**settings),
        loader(samples),
        Training(optimizer, sharded=engine != "ddp"),
        strategy=strategy_of(engine, ranks),
        devices=ranks,
        gradient_clip_val=clip,
    )
    return watch.records, watch.weights, watch.backwards


def looped(rank, ranks, engine, optimizer, settings, samples, clip=None, precision=None):
    """The same by a loop of one's own, over the sampler that Lightning puts in."""
    warnings.simplefilter("ignore")
    rows = data(samples)
    sampler = DistributedSampler(rows, ranks, rank, shuffle=True, seed=0)
    half = {}
    if precision == "16-mixed":
        half = {"autocast": torch.float16, "scaler": scaler_of_float16()}
    elif precision:
        half = {"autocast": torch.bfloat16}
    model = network().float() if half else network()
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model[0])
        fully_shard(model)
    batches = DataLoader(rows, MICRO, sampler=sampler)
    return plain_loop(batches, model, optimizer(model.parameters()), clip=clip, **half, **settings)


def least(engine, optimizer, ranks):
    return 4 * ranks if optimizer is vradam and engine != "ddp" else 4


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_growing_batch_goes_the_way_of_a_plain_loop(ranks, engine, optimizer):
    settings = {
        "policy": bb.Controller(GROWING, 32, 16, smoothing=None),
        "min_micro_batches": least(engine, optimizer, 2),
    }
    expected = ranks(2)(looped, engine, optimizer, settings, 600)[0]

    one, other = ranks(2)(trained, engine, optimizer, settings, 600)

    assert len(expected[0]) == len(one[0]) > 5
    for local, its, theirs in list(zip(expected[0], one[0], other[0], strict=True))[:-1]:
        assert local == pytest.approx(its, rel=1e-9, nan_ok=True)
        assert its == pytest.approx(theirs, nan_ok=True)
    for local, its, theirs in list(zip(expected[1], one[1], other[1], strict=True))[:-1]:
        torch.testing.assert_close(local, its, rtol=1e-9, atol=1e-12)
        assert torch.equal(its, theirs)
    assert len({record["batch_size"] for record in one[0]}) > 2


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
def test_clipping_is_that_of_the_mean_gradient(ranks, engine, optimizer):
    settings = {"policy": bb.Fixed(64), "min_micro_batches": least(engine, optimizer, 2)}
    expected = ranks(2)(looped, engine, optimizer, settings, 192, 0.05)[0]

    actual = ranks(2)(trained, engine, optimizer, settings, 192, 0.05)[0]

    free = ranks(2)(looped, engine, optimizer, settings, 192)[0]
    assert not torch.allclose(free[1][-1], expected[1][-1], rtol=1e-3)
    torch.testing.assert_close(expected[1][-1], actual[1][-1], rtol=1e-9, atol=1e-12)


def accumulated(rank, ranks, k, samples):
    """Lightning's own accumulation."""
    warnings.simplefilter("ignore")
    options = {"strategy": "ddp", "devices": ranks, "accumulate_grad_batches": k}
    return fit(None, loader(samples), **options).weights


def test_a_fixed_batch_is_lightnings_own_accumulation(ranks):
    settings = {"policy": bb.Fixed(3 * 2 * MICRO), "min_micro_batches": 4, "lr_scaling": None}

    expected = ranks(2)(accumulated, 3, 96)[0]
    _, actual, backwards = ranks(2)(trained, "ddp", sgd, settings, 96)[0]

    assert [3] * 4 == backwards
    torch.testing.assert_close(expected, actual, rtol=1e-10, atol=1e-12)


class Uneven(Training):
    """Its ranks have batches of other sizes: no sampler makes them equal."""

    def train_dataloader(self):
        rows = torch.utils.data.Subset(data(54), [range(34), range(34, 54)][dist.get_rank()])
        return DataLoader(rows, (7, 4)[dist.get_rank()])  # five batches each, one of 6 samples


def uneven(rank, ranks):
    warnings.simplefilter("ignore")
    module = Uneven(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    callback = adaptive(
        bb.Fixed(56), micro_batch=7, min_micro_batches=4, lr_scaling=None
    )  # 4 backwards a rank, and the fifth
    options = {"strategy": "ddp", "devices": ranks, "use_distributed_sampler": False}
    watch = fit(callback, None, module, **options)
    return watch.records, watch.weights


def test_unequal_batches_of_ranks_count_by_their_samples(ranks):
    records, weights = ranks(2)(uneven)[0]

    x, y = data(54).tensors
    model = network()
    first = [*range(28), *range(34, 50)]
    for numbers, after in zip((first, sorted({*range(54)} - {*first})), weights, strict=True):
        loss = torch.nn.functional.cross_entropy(model(x[numbers]), y[numbers])
        for p, g in zip(
            model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True
        ):
            p.data -= 0.1 * g
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(flat, after, rtol=1e-10, atol=1e-12)
    assert [44, 54] == [record["samples"] for record in records]


class Reductions(pl.Callback):
    """Counts DDP's all-reduces, bucket by bucket."""

    def __init__(self):
        self.count = 0

    def on_train_start(self, trainer, pl_module):
        trainer.model.register_comm_hook(self, counting)


def counting(state, bucket):
    state.count += 1
    mean = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return mean.get_future().then(lambda done: done.value()[0])


def reduced(rank, ranks):
    warnings.simplefilter("ignore")
    reductions = Reductions()
    callback = adaptive(Scripted(16, 16, 24, 40), batch_size=16, min_micro_batches=4)
    options = {"strategy": "ddp", "devices": ranks, "callbacks": [reductions]}
    return fit(callback, loader(96), **options).backwards, reductions.count


def test_gradients_are_reduced_once_an_update(ranks):
    for backwards, reductions in ranks(2)(reduced):
        assert [2, 2, 3, 5] == backwards
        assert len(backwards) == reductions


def resumed(rank, ranks, engine, optimizer, folder, saved=None):
    warnings.simplefilter("ignore")
    torch.manual_seed(SEED)
    saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    settings = {"policy": GROWING, "batch_size": 32, "base_batch": 16}
    watch = fit(
        adaptive(min_micro_batches=least(engine, optimizer, ranks), **settings),
        loader(200),
        Training(optimizer, sharded=engine != "ddp"),
        strategy=strategy_of(engine, ranks),
        devices=ranks,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[saves],
        ckpt_path=saved,
    )
    return watch.records, watch.weights[-1]


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_checkpoint_continues_on_ranks(ranks, engine, optimizer, tmp_path):
    expected, weights = ranks(2)(resumed, engine, optimizer, tmp_path / "whole")[0]

    saved = tmp_path / "whole" / "epoch=0.ckpt"
    actual, after = ranks(2)(resumed, engine, optimizer, tmp_path / "rest", saved)[0]

    assert 2 < len(actual) < len(expected)
    for one, other in zip(expected[-len(actual) :], actual, strict=True):
        assert one == pytest.approx(other, rel=1e-9, nan_ok=True)
    torch.testing.assert_close(weights, after, rtol=1e-9, atol=1e-12)


def narrow(rank, ranks, engine, precision, optimizer, settings):
    warnings.simplefilter("ignore")
    plugins = []
    if precision == "16-mixed":
        plugins, precision = (
            [pl.plugins.MixedPrecision(precision, "cpu", scaler_of_float16())],
            None,
        )
    watch = fit(
        adaptive(**settings),
        loader(192),
        Narrow(optimizer, sharded=engine != "ddp", dtype=torch.float32),
        strategy=strategy_of(engine, ranks),
        devices=ranks,
        precision=precision,
        plugins=plugins,
    )
    return watch.records, watch.weights


def scaler_of_float16():
    return torch.amp.GradScaler("cpu", init_scale=2.0**20)  # infinite in float16: one is skipped


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
@pytest.mark.parametrize(
    ("engine", "precision"), [("ddp", "16-mixed"), ("ddp", "bf16-mixed"), ("fsdp2", "bf16-mixed")]
)
def test_half_types_go_the_way_of_a_plain_loop(ranks, engine, precision, optimizer):
    settings = {"policy": bb.Fixed(32), "min_micro_batches": least(engine, optimizer, 2)}
    expected = ranks(2)(looped, engine, optimizer, settings, 192, None, precision)[0]

    one, other = ranks(2)(narrow, engine, precision, optimizer, settings)

    assert torch.equal(one[1][-1], other[1][-1])
    skipped = [record["skipped"] for record in one[0]]
    assert [record["skipped"] for record in expected[0]] == skipped
    assert any(skipped) == (precision == "16-mixed")
    for local, its in zip(expected[0], one[0], strict=True):
        assert local == pytest.approx(its, rel=2e-2, nan_ok=True)  # bfloat16 has 8 bits
    torch.testing.assert_close(expected[1][-1], one[1][-1], rtol=1e-2, atol=2e-3)


def faulty(rank, ranks, engine, optimizer):
    warnings.simplefilter("ignore")

    class Faulty(Training):
        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            return loss * float("nan") if (rank, number) == (1, 5) else loss

    watch = fit(
        adaptive(bb.Fixed(32), min_micro_batches=least(engine, optimizer, ranks)),
        loader(128),
        Faulty(optimizer, sharded=engine != "ddp"),
        strategy=strategy_of(engine, ranks),
        devices=ranks,
    )
    return [record["skipped"] for record in watch.records], watch.weights


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks, engine, optimizer):
    for skipped, weights in ranks(2)(faulty, engine, optimizer):
        assert [False, True, False, False] == skipped
        assert torch.equal(weights[0], weights[1])
        assert weights[3].isfinite().all()
        assert not torch.equal(weights[1], weights[2])


class Cycle(Training):
    def configure_optimizers(self):
        optimizer = sgd(self.parameters())
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def cycled(rank, ranks):
    warnings.simplefilter("ignore")
    callback = adaptive(Scripted(16, 48), batch_size=16)
    options = {"strategy": "ddp", "devices": ranks, "max_epochs": 2}
    watch = fit(callback, loader(192), Cycle(), **options)
    scheduler = watch.trainer.lr_scheduler_configs[0].scheduler
    return scheduler.total_steps, scheduler.last_epoch


def test_estimated_stepping_batches_are_base_batches_of_all_ranks(ranks):
    assert [(24, 23)] * 2 == ranks(2)(cycled)


class Validated(Training):
    """Also validated: before the training, within its steps, after it."""

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def val_dataloader(self):
        return loader(24)


def twice(rank, ranks, engine, optimizer, validated):
    """Two trainings of one module, the second one after an evaluation."""
    warnings.simplefilter("ignore")
    settings = {"policy": GROWING, "batch_size": 32, "base_batch": 16}
    callback = adaptive(min_micro_batches=least(engine, optimizer, ranks), **settings)
    module = (Validated if validated else Training)(optimizer, sharded=engine != "ddp")
    options = {"devices": ranks} | ({"val_check_interval": 5} if validated else {})
    watches = []
    for _ in range(2):
        options["strategy"] = strategy_of(engine, ranks)
        watches.append(fit(callback, loader(200), module, **options))
        module.configure_model = lambda: None  # sharded once
        if validated:
            watches[-1].trainer.validate(module)
    return [(watch.records, watch.weights[-1]) for watch in watches]


@pytest.mark.parametrize("optimizer", [sgd, vradam], ids=["SGD", "VRAdam"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_validation_changes_nothing_on_ranks(ranks, engine, optimizer):
    expected = ranks(2)(twice, engine, optimizer, False)[0]
    actual = ranks(2)(twice, engine, optimizer, True)[0]

    for (records, weights), (others, after) in zip(expected, actual, strict=True):
        assert 2 < len(records)
        for one, other in zip(records, others, strict=True):
            assert one == pytest.approx(other, rel=1e-9, nan_ok=True)
        torch.testing.assert_close(weights, after, rtol=1e-9, atol=1e-12)


class Cut(Training):
    def configure_model(self):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def cut(rank, ranks):
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
    with pytest.raises(SettingError) as refused:
        fit(adaptive(GROWING), loader(48), Cut(), strategy=strategy, devices=ranks)
    return str(refused.value)


def test_tensor_parallelism_is_refused_by_name(ranks):
    for message in ranks(2)(cut):
        assert "cuts the model by tensor parallelism" in message
        assert "tensor_parallel_size=1" in message
