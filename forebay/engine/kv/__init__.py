"""The KV cache as bookkeeping: page ids, the prefix tree over them, and what fits. Torch-free."""
