"""Encoders that turn texts into vectors, and the similarity of texts."""
