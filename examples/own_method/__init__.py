"""Best-of-n sampling as a training method."""
