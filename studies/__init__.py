"""Measurements behind the documentation: `python -m studies.NAME`, from a checkout."""
