"""What the methods deliver: comparisons that were run, their logs, tables and figures."""
