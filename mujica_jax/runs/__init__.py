"""A run: what every recipe stands on to sample, learn, evaluate and resume."""
