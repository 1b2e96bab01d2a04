"""Indexes of passages, by words (BM25) and by vectors (exact and ScaNN), and their corpora."""
