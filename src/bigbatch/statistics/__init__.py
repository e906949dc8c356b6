"""Gradients in, statistics out."""
