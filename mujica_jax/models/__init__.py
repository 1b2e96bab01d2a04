"""The decoder in JAX, with its weights, adapters, sharding, quantisation and tokenizer.

It runs models of three families: Qwen2.5, Qwen3 and Llama-3 (`families`).
"""
