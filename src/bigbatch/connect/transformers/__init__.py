"""Hugging Face's Trainer with a batch size that follows a policy; everything else stays its own."""

from bigbatch.connect.packages import required

transformers = required("transformers", "transformers")
required("accelerate", "transformers")

from bigbatch.connect.transformers.trainer import AdaptiveMixin, AdaptiveTrainer  # noqa: E402

__all__ = ["AdaptiveMixin", "AdaptiveTrainer"]
