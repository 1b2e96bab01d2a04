"""EviPath: a teacher writes trajectories from gold evidence, and the policy learns them."""
