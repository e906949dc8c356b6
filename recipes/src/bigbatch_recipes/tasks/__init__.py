"""Model, loss, data and example of each recipe, which need torch; the recipes name them."""
