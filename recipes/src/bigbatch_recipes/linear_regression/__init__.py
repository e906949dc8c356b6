"""The linear regression of the VRGD paper: its figures 1 and 3 under both upper clips."""

from bigbatch_recipes.linear_regression.table import run

__all__ = ["run"]
