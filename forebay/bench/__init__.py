"""Measuring: `forebay bench` drives any OpenAI-compatible server over HTTP; `versus` compares two of them."""
