"""Hugging Face's Trainer with a batch size that follows a policy; all else is unchanged."""

from bigbatch.optional_packages import required

required("accelerate", "transformers")
transformers = required("transformers", "transformers")

from bigbatch.integrations.transformers.trainer import AdaptiveMixin, AdaptiveTrainer

__all__ = ["AdaptiveMixin", "AdaptiveTrainer"]
