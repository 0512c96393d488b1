"""Measuring. `forebay bench` drives any OpenAI-compatible server over HTTP. `suites` puts servers side by side,
`versus` compares with one request at a time, `steps` holds the engine's steps against the machine's limits, `quality`
judges quantized weights.
"""
