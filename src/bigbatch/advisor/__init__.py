"""Advice about the batch size of a training loop that knows nothing of bigbatch."""
