"""CUDA as a program sees it: `torch.cuda`, streams, generators, methods of tensors."""
