"""Engines that run the model: requests in the rows of one KV cache, or in pages of it."""
