"""torchtitan's trainer with a batch that follows the noise: docs/torchtitan.md."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, Any

import torch
import tyro
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.trainer import Trainer

import bigbatch as bb


class AdaptiveTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        policy: Annotated[Any, tyro.conf.Suppress] = field(default_factory=bb.SimiGrad)
        min_batch: int | None = None  # tokens of a step; None for those of the first one
        max_batch: int | None = None

    def __init__(self, config):
        parallelism, training = config.parallelism, config.training
        if parallelism.spmd_backend != "partial_dtensor" or not training.disable_cuda_graphs:
            raise ValueError('set spmd_backend to "partial_dtensor" and disable_cuda_graphs')
        super().__init__(config)
        dims = self.parallel_dims
        if dims.tp_enabled or dims.cp_enabled or dims.pp_enabled or dims.ep_enabled:
            raise ValueError("ranks must be data-parallel alone: dp_shard and dp_replicate")
        self.data_ranks = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        self.micro_tokens = training.local_batch_size * training.seq_len
        first = self.micro_tokens * self.data_ranks * self.gradient_accumulation_steps
        lower, upper = config.min_batch or first, config.max_batch
        self.controller = bb.Controller(config.policy, first, min_batch=lower, max_batch=upper)
        self.controller.require_unit("tokens")
        needs = self.controller.needs
        if needs.history or needs.lr_decay or needs.lr_scaling not in ("any", "sqrt"):
            raise ValueError(f"{config.policy} needs the loop of AdaptiveBatch")
        self.meter = bb.GradientMeter(self.model_parts[0])
        is_chunked = isinstance(self.loss_fn, ChunkedLossWrapper)  # a backward for each chunk
        self.micro_batch = self.meter.micro_batch if is_chunked else nullcontext
        self.statistics, self.valid, self.lrs, self.lr_factor = None, [], [], 1.0
        self.optimizers.register_step_pre_hook(self.scale_rates)
        self.optimizers.register_step_post_hook(self.restore_rates)
        self.plan_step()

    def forward_backward_step(self, *, labels, global_valid_tokens, **inputs):
        self.valid.append((labels != IGNORE_INDEX).sum())
        with self.micro_batch():
            loss = super().forward_backward_step(
                labels=labels, global_valid_tokens=global_valid_tokens, **inputs
            )
        if len(self.valid) == self.plan.accumulation:
            *valid, of_step = torch.stack([*self.valid, global_valid_tokens]).tolist()
            tokens = self.plan.batch_size  # ignored ones too: the sizes of plans do not vary
            self.statistics = self.meter.read(samples=[n * tokens / of_step for n in valid])
            self.valid.clear()
            scale = sqrt(tokens / self.controller.base_batch)
            self.lr_factor = scale * self.controller.decision.lr_factor
            self.controller.next(self.statistics)
            self.plan_step()
        return loss

    def plan_step(self):
        decided, micro = self.controller.decision.batch_size, self.micro_tokens
        bounds = {"min_batch": self.controller.min_batch, "max_batch": self.controller.max_batch}
        cut = {"micro": micro, "max_micro": micro, "min_micro_batches": 2}
        self.plan = bb.BatchPlan.fit(decided, self.data_ranks, **cut, **bounds)
        self.gradient_accumulation_steps = self.plan.accumulation

    def scale_rates(self, *_):
        self.lrs = [(group, group["lr"]) for part in self.optimizers for group in part.param_groups]
        for group, lr in self.lrs:
            group["lr"] = lr * self.lr_factor

    def restore_rates(self, *_):
        for group, lr in self.lrs:
            group["lr"] = lr

    def state_dict(self):
        return {**super().state_dict(), "controller": json.dumps(self.controller.state_dict())}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.controller.load_state_dict(json.loads(state_dict["controller"]))
        self.plan_step()
