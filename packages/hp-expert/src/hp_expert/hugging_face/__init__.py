"""Models of Hugging Face's transformers: their experts over ranks, and their routing replayed."""
