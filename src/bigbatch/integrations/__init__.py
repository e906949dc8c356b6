"""What people train on already, each in one file; only here are optional packages imported."""
