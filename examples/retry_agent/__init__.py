"""An agent that tries again if it found no answer."""
