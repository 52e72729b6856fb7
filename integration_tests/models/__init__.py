"""Models of Hugging Face's transformers in every layout, and folders of models in and out."""
