"""The papers' experiments: one file each, with its settings; `recipe_registry` has all."""
