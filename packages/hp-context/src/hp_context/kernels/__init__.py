"""What computes one block of attention on which device."""
