"""Learning: pack conversations into rows, train a policy on them, and save checkpoints."""
