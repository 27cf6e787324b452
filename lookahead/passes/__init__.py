"""How a forward pass is run, what it costs, and whether it says what the model says."""
