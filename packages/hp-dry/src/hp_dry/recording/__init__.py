"""Recording: what one rank asks of its device, from which line, with which memory."""
