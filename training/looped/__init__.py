"""A small looped language model: its text, tokenizer, architecture, training and evaluation."""
