"""A task whose questions ask for the facts of a table."""
