"""The networks of the recipes."""
