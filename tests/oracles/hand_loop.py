"""Trainings of tests/advisor/scripts, repeated with every compared gradient by its own backward.

A hand loop builds what its script builds and trains as the script does. Before a backward of the
script it computes the gradient of the whole micro-batch, or of each of its groups of samples, by
`torch.autograd.grad`, which leaves `.grad` as it is. So the losses are those of the script.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

SCRIPTS = Path(__file__).parents[1] / "advisor" / "scripts"
GROUPS = 8


class Measurement(NamedTuple):
    grad_sqnorm: float
    grad_variance: float
    samples: int
    micro_batches: int


def measured(gradients: list[Tensor], sizes: list[int]) -> Measurement:
    """The definition, for gradients g_d that are means over n_d samples."""
    k, N = len(sizes), sum(sizes)
    G = sum(n * g for n, g in zip(sizes, gradients, strict=True)) / N
    noise = sum(n * ((g - G) ** 2).sum() for n, g in zip(sizes, gradients, strict=True)) / (k - 1)
    signal = (G**2).sum() - noise / N
    return Measurement(float(signal), float(noise), N, k)


@dataclass
class HandLoop:
    """What a training's steps measure.

    Args:
        parameters: of the optimizers.
        groups: groups of samples of each backward, 1 for whole micro-batches.
        scale: of the losses in the backwards, for float16; a power of two.
    """

    parameters: Iterable[Tensor]
    groups: int = 1
    scale: float = 1.0
    losses: list[float] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)  # of each step
    sizes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = list(self.parameters)
        self._begin()

    def add(self, loss_of: Callable[..., Tensor], *batch: Tensor) -> None:
        """Computes the gradients of a backward.

        Args:
            loss_of: tensors of some samples -> the mean loss of the samples.
            batch: tensors of the samples of the micro-batch.
        """
        for part in zip(*(groups_of(tensor, self.groups) for tensor in batch), strict=True):
            found = torch.autograd.grad(loss_of(*part) * self.scale, self.parameters)
            gradient = torch.cat([g.flatten().double() for g in found])
            self._gradients.append(gradient / self.scale)
            self._sizes.append(len(part[0]))

    def end_step(self) -> None:
        self.gradients.append(self._gradients)
        self.sizes.append(self._sizes)
        self._begin()

    def drop_step(self) -> None:
        self._begin()

    def measurements(self) -> list[Measurement]:
        """Of every step."""
        return [measured(*step) for step in zip(self.gradients, self.sizes, strict=True)]

    def measurements_of_pairs(self) -> list[Measurement]:
        """Of steps t - 1 and t, from t = 1: signal g . h, noise n |g - h|^2 / 2."""
        means = [
            sum(n * g for n, g in zip(sizes, gradients, strict=True)) / sum(sizes)
            for gradients, sizes in zip(self.gradients, self.sizes, strict=True)
        ]
        samples = [sum(sizes) for sizes in self.sizes]
        return [
            measured(means[t - 1 : t + 1], samples[t - 1 : t + 1]) for t in range(1, len(means))
        ]

    def _begin(self) -> None:
        self._gradients: list[Tensor] = []
        self._sizes: list[int] = []


def groups_of(tensor: Tensor, groups: int) -> list[Tensor]:
    """Consecutive samples; sizes differ by at most one, larger groups first."""
    size, larger = divmod(len(tensor), groups)
    sizes = [size + 1 if group < larger else size for group in range(groups)]
    return list(torch.split(tensor, [size for size in sizes if size]))


def module_of(name: str) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repeat(name: str, arguments: list[str], groups: int = 1, ranks: int = 1) -> HandLoop:
    """The training of a script with these arguments.

    Args:
        name: of the script.
        arguments: of its command line.
        groups: compared groups of samples in each backward, 1 for whole micro-batches.
        ranks: processes that the script has.
    """
    script = module_of(name)
    return LOOPS[name](script, script.parse(arguments), groups, ranks)


def nanogpt_style(script, args, groups, ranks):
    data, model, optimizer = script.build(args)
    loop, accumulation = HandLoop(model.parameters(), groups), args.gradient_accumulation_steps

    def loss_of(x, y):
        with script.autocast_of(args):
            return model(x, y)[1]

    batch = script.get_batch(data, args)
    for iteration in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = script.get_lr(iteration, args)
        for _ in range(accumulation):
            loop.add(loss_of, *batch)
            loss = loss_of(*batch) / accumulation
            loss.backward()
            batch = script.get_batch(data, args)
        if args.grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        loop.end_step()
        loop.losses.append(loss.item() * accumulation)
    return loop


def timm_style(script, args, groups, ranks):
    """A step with an overflow, which the scaler leaves out, is no step of the optimizer."""
    loader, model, optimizer, scheduler, scaler = script.build(args)
    loop = HandLoop(model.parameters(), groups, scale=2.0**10 if args.amp else 1.0)
    accumulation = args.grad_accum_steps
    batches = script.endless(loader)

    def loss_of(images, target):
        with script.autocast_of(args):
            return nn.functional.cross_entropy(model(images), target, label_smoothing=0.1)

    for _ in range(args.steps):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulation):
            batch = next(batches)
            loop.add(loss_of, *batch)
            loss = loss_of(*batch) / accumulation
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        scheduler.step()
        if scaler.get_scale() < scale:
            loop.drop_step()
        else:
            loop.end_step()
        loop.losses.append(total)
    return loop


def accelerate_example(script, args, groups, ranks):
    """The objects are accelerate's, which also shuffles; accumulation and rates are plain."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    _, model, optimizer, loader, scheduler = script.build(args)
    optimizer, scheduler = optimizer.optimizer, scheduler.scheduler
    loop, accumulation = HandLoop(model.parameters(), groups), args.gradient_accumulation_steps

    def loss_of(inputs, labels):
        return model(inputs, labels)["loss"]

    backwards = 0
    while len(loop.gradients) < args.steps:
        for batch in loader:
            loop.add(loss_of, *batch)
            loss = loss_of(*batch)
            (loss / accumulation).backward()
            loop.losses.append(loss.item())
            backwards += 1
            if backwards % accumulation == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                loop.end_step()
            if len(loop.gradients) == args.steps:
                break
    AcceleratorState._reset_state(reset_partial_state=True)
    return loop


def lightning_module(script, args, groups, ranks):
    """Lightning's own loop, which computes a backward's gradients before it trains on them."""
    from lightning.pytorch import Callback

    module, loader, trainer = script.build(args)
    loop = HandLoop(module.parameters(), groups)

    def loss_of(x, y):
        return nn.functional.mse_loss(module.net(x), y)

    class BackwardsOfTheirOwn(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            loop.add(loss_of, *batch)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (batch_idx + 1) % args.accumulate_grad_batches == 0:
                loop.end_step()

    trainer.callbacks.append(BackwardsOfTheirOwn())
    trainer.fit(module, loader)
    loop.losses = module.losses
    return loop


def ddp_script(script, args, groups, ranks):
    """All ranks in turn; the losses are of the first."""
    dataset, model, optimizer = script.build(args)
    loop = HandLoop(model.parameters(), groups)
    batches = [script.batches(dataset, args, rank, ranks) for rank in range(ranks)]

    def loss_of(x, y):
        return nn.functional.cross_entropy(model(x), y)

    for _ in range(args.steps):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(ranks):  # added as DDP adds: backwards first, then ranks
            optimizer.zero_grad()
            for _ in range(args.accumulation):
                batch = next(batches[rank])
                loop.add(loss_of, *batch)
                loss = loss_of(*batch) / args.accumulation
                (loss / ranks).backward()
                if rank == 0:
                    loop.losses.append(loss.item())
            sums = [total + p.grad for total, p in zip(sums, model.parameters(), strict=True)]
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
        loop.end_step()
    return loop


def deepspeed_script(script, args, groups, ranks):
    """All ranks in turn, without DeepSpeed; the losses are of the first rank."""
    model, optimizer = script.build()
    loop, accumulation = HandLoop(model.parameters(), groups), args.gradient_accumulation_steps
    rows = [script.made_rows(rank) for rank in range(ranks)]

    def loss_of(x, y):
        return nn.functional.cross_entropy(model(x), y)

    for step in range(args.steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for number in range(step * accumulation, (step + 1) * accumulation):
                batch = script.micro_batch(rows[rank], number, args)
                loop.add(loss_of, *batch)
                loss = loss_of(*batch)
                (loss / accumulation / ranks).backward()
                if rank == 0:
                    loop.losses.append(loss.item())
        optimizer.step()
        loop.end_step()
    return loop


def hf_trainer(script, args, groups, ranks):
    """The Trainer's own loop, which computes a backward's gradients before it trains on them."""
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback

    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = script.build(args)
    loop = HandLoop(trainer.model.parameters(), groups)
    accumulation = args.gradient_accumulation_steps
    train_on = trainer.training_step

    def training_step(model, inputs, num_items_in_batch):
        """A part of the samples has its part of the step's tokens, over which the Trainer means."""
        model.train()
        rows = len(inputs["labels"])

        def loss_of(input_ids, labels):
            share = accumulation * rows / len(labels)
            given = {"input_ids": input_ids, "labels": labels}
            return model(**given, num_items_in_batch=num_items_in_batch / share).loss

        loop.add(loss_of, inputs["input_ids"], inputs["labels"])
        return train_on(model, inputs, num_items_in_batch)

    class StepEnds(TrainerCallback):
        def on_optimizer_step(self, *args, **kwargs):
            loop.end_step()

    trainer.training_step = training_step
    trainer.add_callback(StepEnds())
    trainer.train()
    loop.losses = trainer.losses
    AcceleratorState._reset_state(reset_partial_state=True)
    return loop


def two_optimizers(script, args, groups, ranks):
    """Both optimizers' parameters are one gradient."""
    model, optimizers = script.build()
    loop = HandLoop(model.parameters(), groups)
    for _ in range(args.steps):
        batch = script.get_batch(args)
        loop.add(lambda *part: script.loss_of(model, *part), *batch)
        loss = script.loss_of(model, *batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        loop.end_step()
        loop.losses.append(loss.item())
    return loop


def gradient_penalty(script, args, groups, ranks):
    critic, optimizer = script.build()
    loop = HandLoop(critic.parameters(), groups)
    for _ in range(args.steps):
        batch = script.get_batch()
        loop.add(lambda *part: script.loss_of(critic, *part), *batch)
        loss = script.loss_of(critic, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.end_step()
        loop.losses.append(loss.item())
    return loop


LOOPS = {
    loop.__name__: loop
    for loop in (
        nanogpt_style,
        timm_style,
        accelerate_example,
        lightning_module,
        ddp_script,
        deepspeed_script,
        hf_trainer,
        two_optimizers,
        gradient_penalty,
    )
}
