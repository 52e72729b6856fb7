"""Replacements for `torch.cuda`, streams, generators and methods of tensors."""
