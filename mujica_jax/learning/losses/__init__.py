"""The losses, all equals for the trainer."""
