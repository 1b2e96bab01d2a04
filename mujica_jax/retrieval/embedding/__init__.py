"""Encoders that turn texts into vectors, and how alike two texts are by them."""
