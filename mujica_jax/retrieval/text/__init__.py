"""Corpora of passages, and their indexes: BM25 over words, exact and ScaNN over embeddings."""
