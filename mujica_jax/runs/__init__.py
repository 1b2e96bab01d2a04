"""The parts that all recipes share: set up a run, sample, learn, commit, evaluate and resume."""
