"""EviPath: a teacher writes trajectories from gold evidence, and they are learnt."""
