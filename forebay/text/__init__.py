"""Between text and token ids: the tokenizer, the chat template, and the way back as tokens come. No torch."""
