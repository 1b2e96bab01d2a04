"""Tasks: questions in splits, the environments that answer searches, and scoring rules."""
