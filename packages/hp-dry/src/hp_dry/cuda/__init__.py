"""What a program sees of CUDA: `torch.cuda`, streams, generators, methods of tensors."""
