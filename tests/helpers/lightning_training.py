"""A small Lightning training, and the same training as a plain loop over the same micro-batches."""

import logging

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.integrations.lightning import AdaptiveBatchCallback
from bigbatch.optim import VRSGD

MICRO = 4
SEED = 5
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)


class Scripted:
    """A policy that follows a list, then stays."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def decide(self, noise, now):
        wanted = self.sizes[now.steps] if now.steps < len(self.sizes) else now.target_batch_size
        return bb.Decision(wanted, "scripted")


def data(samples):
    draw = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
    noise = torch.randn(samples, generator=draw, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] + noise > 0).long() + (x[:, 1] > 0).long())


def loader(samples, **options):
    return DataLoader(data(samples), **{"batch_size": MICRO, **options})


def network():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def vrsgd(parameters):
    return VRSGD(parameters, lr=0.05, momentum=0.9)


class Training(pl.LightningModule):
    """What a user of Lightning has.

    Args:
        optimizer: makes one of the parameters.
        scheduler: makes one of the optimizer, and says the rest of its configuration.
        sharded: whether configure_model() shards it.
        dtype: of the weights.
    """

    def __init__(self, optimizer=sgd, scheduler=None, sharded=False, dtype=torch.float64):
        super().__init__()
        self.net = network().to(dtype)
        self.sharded = sharded
        self.made_of = optimizer, scheduler

    def configure_model(self):
        if self.sharded:
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        make_optimizer, make_scheduler = self.made_of
        optimizer = make_optimizer(self.parameters())
        if make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(optimizer)}

    def training_step(self, batch, _):
        x, y = batch
        return cross_entropy(self.net(x), y)


class Narrow(Training):
    """Under autocast; its loss is float32."""

    def training_step(self, batch, _):
        x, y = batch
        return cross_entropy(self.net(x.float()).float(), y)


class Watch(pl.Callback):
    """Notes every update: its record, its micro-batches here, the weights after it."""

    def __init__(self, adaptive=None):
        self.adaptive = adaptive
        self.records, self.backwards, self.weights = [], [], []
        self._updates, self._backwards = 0, 0

    def on_train_start(self, trainer, pl_module):
        self._updates = trainer.global_step

    def on_after_backward(self, trainer, pl_module):
        self._backwards += 1

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > self._updates:
            self._updates = trainer.global_step
            self.backwards.append(self._backwards)
            self.weights.append(weights_of(pl_module.net))
            self._backwards = 0
            if self.adaptive is not None:
                self.records.append(facts(self.adaptive.train.record))


def fit(callback, batches, module=None, *, ckpt_path=None, callbacks=(), **options):
    """Trains; returns what was watched."""
    watch = Watch(callback)
    ours = [] if callback is None else [callback]
    options = {**QUIET, "max_epochs": 1, **options}
    trainer = pl.Trainer(callbacks=[*ours, watch, *callbacks], **options)
    trainer.fit(module or Training(), batches, ckpt_path=ckpt_path)
    watch.trainer = trainer
    return watch


def adaptive(policy, **settings):
    return AdaptiveBatchCallback(policy, **{"every": 1, **settings})


def plain_loop(batches, model, optimizer, epochs=1, clip=None, autocast=None, **settings):
    """The same as a loop of one's own; micro-batches are those of the loader."""
    batches = bb.Batches(batches, remainder="step")
    train = bb.AdaptiveBatch(
        model, optimizer, batches, fixed_micro_batch=True, **{"every": 1, **settings}
    )
    records, weights = [], []
    for _ in train.epochs(epochs):
        for step in train:
            for x, y in step:
                step.backward(loss_of(model, x, y, autocast))
            if clip:
                step.clip_grad_norm_(clip)
            records.append(facts(step.update()))
            weights.append(weights_of(model))
    return records, weights


def loss_of(model, x, y, autocast):
    if autocast is None:
        return cross_entropy(model(x), y)
    with torch.autocast("cpu", autocast):
        return cross_entropy(model(x.float()).float(), y)


def facts(record):
    """What of a record is the same in any run."""
    return {
        "samples": record.samples,
        "batch_size": record.batch_size,
        "target_batch_size": record.target_batch_size,
        "micro_batches": record.micro_batches,
        "next": record.decision.batch_size,
        "skipped": record.skipped,
        "epoch": record.epoch,
        "lr": record.lr[0],
        "loss": record.loss,
        "similarity": record.similarity,
        "noise_scale": record.noise_scale,
    }


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights_of(model):
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
