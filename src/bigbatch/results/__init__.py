"""Experiments for the page of results: each trains, and draws tables and figures of its log."""
