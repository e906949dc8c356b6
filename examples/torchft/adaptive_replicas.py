"""Replicas under torchft that come and go, with a batch that follows the noise: docs/launch.md."""

from math import isfinite, sqrt

import torch
import torchft

import bigbatch as bb


def committed_steps(model, inner, batches, loss_fn, controller, *, micro, **options):
    """Yields the plan and the statistics of each committed step; `options` are a Manager's."""
    needs = controller.needs
    if needs.history or needs.lr_decay or needs.lr_scaling not in ("any", "sqrt"):
        raise ValueError(f"{controller.policy} needs the loop of AdaptiveBatch")

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        controller.load_state_dict(state["controller"])

    def save():
        parts = {"model": model, "optimizer": inner, "controller": controller}
        return {name: part.state_dict() for name, part in parts.items()}

    # a replica that joins has the state of the others before its first forward
    options |= {"load_state_dict": load, "state_dict": save, "use_async_quorum": False}
    manager = torchft.Manager(**options)
    optimizer = torchft.Optimizer(manager, inner)
    meter = bb.GradientMeter(model)  # of this replica's own gradients: no torchft DDP around it
    try:
        while True:
            optimizer.zero_grad()  # the quorum of this step
            plan = bb.BatchPlan.fit(
                controller.decision.batch_size,
                manager.num_participants(),
                micro=micro,
                max_micro=micro,
                min_accumulation=2,
                min_batch=controller.min_batch,
                max_batch=controller.max_batch,
            )
            for _ in range(plan.accumulation):
                x, y = next(batches)
                (loss_fn(model(x), y) / plan.accumulation).backward()
            own = meter.read(samples=[micro] * plan.accumulation)
            mean = torch.tensor([own.grad_sqnorm, own.grad_variance], dtype=torch.float64)
            for values in [mean, *(p.grad for p in model.parameters() if p.grad is not None)]:
                manager.allreduce(values).wait()  # the mean over the replicas of the quorum
            signal, noise = mean.tolist()
            if not isfinite(signal + noise):
                manager.report_error(ValueError("the gradient is not finite"))
            factor = controller.decision.lr_factor * sqrt(plan.batch_size / controller.base_batch)
            rates = [group["lr"] for group in inner.param_groups]
            for group in inner.param_groups:
                group["lr"] *= factor
            before = manager.current_step()
            optimizer.step()  # steps only if all went well
            for group, lr in zip(inner.param_groups, rates, strict=True):
                group["lr"] = lr
            if manager.current_step() > before:
                size, count = plan.batch_size, plan.micro_batches
                statistics = bb.GradientStatistics(signal, noise, size, count)
                controller.next(statistics)
                yield plan, statistics
    finally:
        meter.close()
        manager.shutdown(wait=False)
