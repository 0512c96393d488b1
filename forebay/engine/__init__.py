"""Tokens in, tokens out: scheduling, KV cache, model, sampling. Never sees text, HTTP or Redis."""
