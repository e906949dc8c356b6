"""Hugging Face's Trainer with a batch size that follows a policy; all else is unchanged."""

from bigbatch.optional_packages import import_optional

import_optional("accelerate", "transformers")
transformers = import_optional("transformers", "transformers")

from bigbatch.integrations.transformers.trainer import AdaptiveMixin, AdaptiveTrainer

__all__ = ["AdaptiveMixin", "AdaptiveTrainer"]
