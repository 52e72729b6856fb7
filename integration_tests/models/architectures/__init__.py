"""What is proven of architectures of transformers: each in every layout beside one process."""
