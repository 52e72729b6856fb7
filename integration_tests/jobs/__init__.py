"""Jobs beside one process: `hp-verify` of training loops of many kinds, of libraries and bugs."""
