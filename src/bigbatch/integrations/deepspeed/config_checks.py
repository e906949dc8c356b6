"""What of DeepSpeed is refused, and why: it would give a wrong number, or was not tried."""

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from bigbatch.errors import SettingError


def require_supported(engine: Any) -> None:
    """Raises SettingError, with the setting and the reason, unless adaptation is right there.

    Source:
        docs/deepspeed.md, the table.
    """
    if type(engine) is not DeepSpeedEngine:
        _refuse(
            f"{type(engine).__name__} (a pipeline or a hybrid engine)",
            "it has a step of its own",
            "pass a plain module",
        )
    if not isinstance(engine.basic_optimizer, torch.optim.Optimizer):
        _refuse("no optimizer", "its learning rates follow the batch", "configure or pass one")
    for setting, holds, why, remedy in _refusals(engine):
        if holds:
            _refuse(setting, why, remedy)


def _refusals(engine: Any) -> list[tuple[str, bool, str, str]]:
    """(setting, whether it is on, what it would do, remedy)."""
    config, stage = engine._config, engine.zero_optimization_stage()
    untried = "it was not tried with batches that change"
    several_groups = len(engine.basic_optimizer.param_groups) > 1
    return [
        (
            "fp16",
            engine.fp16_enabled() or engine.torch_autocast_dtype() == torch.float16,
            "at stage 0 DeepSpeed divides by a loss scale that it never multiplied by, and "
            "elsewhere " + untried,
            "use bf16",
        ),
        (
            '"gradient_allreduce_op": "sum"',
            not engine.gradient_average,
            "gradients would be summed over ranks, and steps as many times too long",
            'leave it "mean"',
        ),
        (
            '"compute_grad_norm": false',
            engine.zero_optimization() and not engine.zero_compute_grad_norm(),
            "a gradient that is not finite would be applied",
            "leave it on",
        ),
        (
            '"check_grad_overflow": false',
            engine.bfloat16_enabled() and not config.bfloat16_config.check_grad_overflow,
            "a gradient that is not finite would be applied",
            "leave it on",
        ),
        (
            '"managed_gradient_accumulation": false',
            not engine.managed_gradient_accumulation(),
            "every engine.step() would be an update, so that your loop and not the policy decided "
            "how many micro-batches it has",
            "leave it out, and call engine.step() after every engine.backward(loss)",
        ),
        ("mixture of experts", engine.has_moe_layers, untried, ""),
        ("sequence parallelism", engine.sequence_parallel_size > 1, untried, ""),
        ("tensor or model parallelism", _model_parallel(engine), untried, ""),
        ("ZenFlow", bool(engine.zenflow), untried, ""),
        (
            '"zero_quantized_gradients"',
            engine.zero_quantized_gradients(),
            "gradients are rounded as they are joined",
            "leave it off",
        ),
        (
            "Muon",
            "muon" in type(engine.basic_optimizer).__name__.lower(),
            "ZeRO makes it of the gradient before the gradient can be read",
            "use another optimizer",
        ),
        (
            "curriculum or data-efficiency sampling",
            engine.curriculum_learning_enabled() or engine.data_efficiency_enabled(),
            "its sampler sets the batch size too",
            "",
        ),
        ("DeepCompile", engine.is_deepcompile_enabled(), "it joins the ranks by itself", ""),
        ("NVMe offload", engine.zero_nvme_offload_optimizer(), untried, "offload to the CPU"),
        (
            "a universal checkpoint at stage 3 with several parameter groups",
            stage == 3 and several_groups and config.load_universal_checkpoint,
            "DeepSpeed resumes them with the optimizer state of other parameters",
            "use one group, or resume on as many ranks",
        ),
    ]


def _refuse(setting: str, why: str, remedy: str) -> None:
    raise SettingError(
        f"{setting}: {why}; {remedy or 'leave it out'} (docs/deepspeed.md has what works)"
    )


def _model_parallel(engine: Any) -> bool:
    return engine.mpu is not None or engine.autotp_size() > 1
