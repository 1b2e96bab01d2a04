"""Tasks: questions by split, the environments that they are asked in, and their scoring rules."""
