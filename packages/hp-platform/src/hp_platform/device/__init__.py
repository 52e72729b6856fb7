"""Which device computes, its streams, and which operands its kernels take from another."""
