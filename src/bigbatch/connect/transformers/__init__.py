"""Hugging Face's Trainer with a batch size that follows a policy; everything else stays its own."""

from bigbatch.connect.packages import required

required("accelerate", "transformers")
transformers = required("transformers", "transformers")

from bigbatch.connect.transformers.trainer import AdaptiveMixin, AdaptiveTrainer

__all__ = ["AdaptiveMixin", "AdaptiveTrainer"]
