"""Decoders of three families in JAX, with their weights, adapters, sharding and tokenizers."""
