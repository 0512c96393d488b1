"""The model: its shape, its weights, and one decoder for the Llama-shaped families."""
