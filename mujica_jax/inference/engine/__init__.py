"""The engines: they hold the model's weights and the KV cache, and run prefill and decode."""
