"""Settings of the Trainer that are refused or warned of, each with its remedy."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer, TrainingArguments
from transformers.optimization import GreedyLR
from transformers.utils import is_sagemaker_mp_enabled

from bigbatch.errors import SettingError
from bigbatch.integrations.accelerate import require_supported
from bigbatch.policies.policy import Fixed
from bigbatch.training.training_parts import steppable


def require_arguments(arguments: list[Any]) -> None:
    """Raises SettingError for training arguments that are not supported."""
    for args in arguments:
        if isinstance(args, TrainingArguments):
            for message in _refusals(args):
                raise SettingError(message)


def require_overridable(kind: type, mixin: type) -> None:
    """Raises SettingError if a class overrides a method that is called for whole updates."""
    order = kind.__mro__
    for each in order[: order.index(mixin)]:
        if "training_step" in vars(each):
            raise SettingError(
                f"{each.__name__}.training_step would get a whole update, not a micro-batch; "
                "override compute_loss there, or put it into a class after the mixin: class "
                f"{kind.__name__}(AdaptiveMixin, MyTrainer), with training_step in MyTrainer"
            )
    for each in order[: order.index(Trainer)]:
        if each is not mixin and "get_batch_samples" in vars(each):
            raise SettingError(
                f"{each.__name__}.get_batch_samples is not called: an update has as many "
                "micro-batches as the policy decides; override compute_loss, or the data_collator"
            )


def require_trainer(trainer: Any, options: Mapping[str, Any]) -> None:
    """Raises SettingError if a Trainer was built with unsupported parts or options."""
    require_arguments([trainer.args])  # its default ones, or changed by accelerate's configuration
    if trainer.optimizer is not None:
        steppable(trainer.optimizer)
        if trainer.is_deepspeed_enabled:
            raise SettingError(
                f"optimizers=({type(trainer.optimizer).__name__}, ...): on DeepSpeed the Trainer "
                "replaces it by one of its own; pass optimizer_cls_and_kwargs=(class, settings)"
            )
    scheduler = trainer.lr_scheduler
    if isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)):
        raise SettingError(_plateau(f"optimizers=(..., {type(scheduler).__name__})"))
    if trainer.is_distributed_loading_by_transformers:
        raise SettingError(
            "the model was sharded when it was loaded (distributed_config), outside accelerate; "
            "load it whole, and pass fsdp=True to TrainingArguments"
        )
    require_supported(trainer.accelerator, options)


def warn_of_growth(args: Any, policy: Any) -> None:
    """Warns that `max_steps` ends a training at another place than its learning rate schedule."""
    constant = "constant" in str(args.lr_scheduler_type)
    if not constant and not isinstance(policy, Fixed):
        warnings.warn(
            f"max_steps={args.max_steps} ends the training after so many updates, and the "
            "learning rate schedule after so many base batches, which a growing batch uses up "
            "earlier; num_train_epochs ends both together",
            stacklevel=4,
        )


def _plateau(setting: str) -> str:
    return (
        f"{setting} follows a metric, and the schedule here counts base batches of samples; choose "
        'another, such as "linear", or "constant" with a policy that grows the batch'
    )


def _refusals(args: Any) -> Iterator[str]:
    if args.gradient_accumulation_steps != 1:
        yield (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: accumulation follows "
            "from batch_size= and micro_batch= here; leave it at 1"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True starts the training again with smaller batches; set "
            "per_device_train_batch_size, or micro_batch=, to what fits"
        )
    if args.n_gpu > 1:
        yield (
            f"{args.n_gpu} GPUs in one process (DataParallel) are not supported; start one process "
            "for each by torchrun, or set CUDA_VISIBLE_DEVICES"
        )
    if is_sagemaker_mp_enabled():
        yield "SageMaker's model parallelism is not supported; train with DDP or FSDP2"
    yield from _loop_refusals(args)
    yield from _data_refusals(args)


def _loop_refusals(args: Any) -> Iterator[str]:
    optim, schedule = _value(args.optim), _value(args.lr_scheduler_type)
    if "lomo" in optim or "layerwise" in optim:
        yield (
            f"optim={optim!r} updates weights inside backward, before the gradient of the batch is "
            'complete; choose another, such as "adamw_torch"'
        )
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        yield _plateau(f"lr_scheduler_type={schedule!r}")
    if args.fsdp and int((args.fsdp_config or {}).get("version", 2)) == 1:
        yield "fsdp_config['version']=1 flattens parameters; set it to 2"
    if args.fsdp and (args.fsdp_config or {}).get("xla"):
        yield "fsdp_config['xla']=True is not supported; leave it out"
    if getattr(args, "enable_jit_checkpoint", False):
        yield (
            "enable_jit_checkpoint=True saves in the middle of an update, which cannot be resumed; "
            "remove it, and save by save_steps"
        )


def _data_refusals(args: Any) -> Iterator[str]:
    if args.ignore_data_skip:
        yield (
            "ignore_data_skip=True would start the data of an interrupted epoch again; remove it: "
            "a resumed run continues with the remaining samples"
        )
    if _value(getattr(args, "train_sampling_strategy", "random")) == "batch_rebalance":
        yield (
            "train_sampling_strategy='batch_rebalance' composes batches of one size; choose "
            "'random', 'sequential' or 'group_by_length'"
        )
    if not args.average_tokens_across_devices and args.world_size > 1:
        yield (
            "average_tokens_across_devices=False weighs ranks equally, whatever their tokens; "
            "leave it True: every token of the batch has the same weight"
        )


def _value(setting: Any) -> str:
    return str(getattr(setting, "value", setting))
