"""How a pass is run, what it costs, and whether its logits are those of plain decoding."""
