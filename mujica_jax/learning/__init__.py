"""Learning: rows are packed, and a trainer takes steps of a loss and saves checkpoints."""
