"""Gradients of k groups of samples from one backward, computed at the nodes of its graph."""
