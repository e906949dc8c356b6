"""Compiled passes over float32 arrays on the CPU; without a compiler torch does the same."""
