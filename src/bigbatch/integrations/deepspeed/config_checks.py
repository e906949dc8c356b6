"""DeepSpeed settings that are refused, as they would give wrong results or are not tested."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from bigbatch.errors import SettingError
from bigbatch.optim.optimizer_settings import parts_of


def require_supported(engine: Any) -> None:
    """Raises SettingError, with the setting and the reason, unless adaptation is supported.

    Source:
        docs/deepspeed.md, the table of refused settings.
    """
    if type(engine) is not DeepSpeedEngine:
        _refuse(
            f"{type(engine).__name__} (a pipeline or a hybrid engine)",
            "it has a step of its own",
            "pass a plain module",
        )
    if not isinstance(engine.basic_optimizer, torch.optim.Optimizer):
        _refuse("no optimizer", "its learning rates follow the batch", "configure or pass one")
    require_one(engine.basic_optimizer)
    for setting, is_on, reason, remedy in _unsupported_settings(engine):
        if is_on:
            _refuse(setting, reason, remedy)


def require_one(optimizer: Any) -> None:
    """Raises SettingError for several optimizers."""
    if len(parts_of(optimizer)) > 1:
        _refuse(
            f"several optimizers in a {type(optimizer).__name__}",
            "ZeRO has one optimizer, which steps flat partitions of all parameters",
            "pass one optimizer, or train the several under DDP or FSDP2",
        )


def require_no_options(options: Mapping[str, Any]) -> None:
    """Raises SettingError for options of AdaptiveBatch that do not work on DeepSpeed."""
    if options.get("groups") is not None:
        raise SettingError(
            f"groups={options['groups']}: DeepSpeed reduces in every backward, and so in the one "
            "that finds where samples are; leave groups out, micro-batches are compared"
        )
    if options.get("accumulate_float32_above") is not None:
        raise SettingError(
            f"accumulate_float32_above={options['accumulate_float32_above']}: DeepSpeed adds up "
            'gradients itself; leave it out, and set "data_types": {"grad_accum_dtype": "fp32"} '
            "in its config"
        )
    if options.get("transport"):
        raise SettingError(
            "transport=True was not tried with DeepSpeed's optimizers; leave transport out"
        )


def _unsupported_settings(engine: Any) -> list[tuple[str, bool, str, str]]:
    """(setting, whether it is on, why it is refused, remedy)."""
    config, stage = engine._config, engine.zero_optimization_stage()
    untested = "it is not tested with batches that change"
    model_parallel = engine.mpu is not None or engine.autotp_size() > 1
    several_groups = len(engine.basic_optimizer.param_groups) > 1
    return [
        (
            "fp16",
            engine.fp16_enabled() or engine.torch_autocast_dtype() == torch.float16,
            "at stage 0 DeepSpeed divides by a loss scale that it never multiplied by, and "
            "elsewhere " + untested,
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
        ("mixture of experts", engine.has_moe_layers, untested, ""),
        ("sequence parallelism", engine.sequence_parallel_size > 1, untested, ""),
        ("tensor or model parallelism", model_parallel, untested, ""),
        ("ZenFlow", bool(engine.zenflow), untested, ""),
        (
            '"zero_quantized_gradients"',
            engine.zero_quantized_gradients(),
            "gradients are rounded as they are reduced",
            "leave it off",
        ),
        (
            "Muon",
            "muon" in type(engine.basic_optimizer).__name__.lower(),
            "ZeRO applies it to the gradient before the gradient can be read",
            "use another optimizer",
        ),
        (
            "curriculum or data-efficiency sampling",
            engine.curriculum_learning_enabled() or engine.data_efficiency_enabled(),
            "its sampler sets the batch size too",
            "",
        ),
        ("DeepCompile", engine.is_deepcompile_enabled(), "it reduces gradients by itself", ""),
        ("NVMe offload", engine.zero_nvme_offload_optimizer(), untested, "offload to the CPU"),
        (
            "a universal checkpoint at stage 3 with several parameter groups",
            stage == 3 and several_groups and config.load_universal_checkpoint,
            "DeepSpeed resumes them with the optimizer state of other parameters",
            "use one group, or resume on as many ranks",
        ),
    ]


def _refuse(setting: str, reason: str, remedy: str) -> None:
    raise SettingError(
        f"{setting}: {reason}; {remedy or 'leave it out'} (docs/deepspeed.md has what works)"
    )
