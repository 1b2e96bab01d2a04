"""Maximum likelihood in which every conversation has the same weight."""
