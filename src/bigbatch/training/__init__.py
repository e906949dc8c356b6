"""AdaptiveBatch: the training loop whose batch size follows a policy."""
