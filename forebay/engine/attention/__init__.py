"""How a row of the batch looks at the K and V of its sequence."""
