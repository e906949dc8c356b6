"""Connections to other training frameworks; only they import optional packages."""
