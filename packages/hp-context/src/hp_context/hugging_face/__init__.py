"""Models of Hugging Face's transformers over a sequence that is split across ranks."""

from hp_context.hugging_face.register import register_attention

__all__ = ["register_attention"]
