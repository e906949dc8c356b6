"""Engines that run a training on several ranks: DistributedDataParallel, or DeepSpeed."""
