"""Scripts as users write them: the tests start them, pytest does not collect them."""

collect_ignore = ["scripts"]
