"""A model's layers: their attention, their cache and their masks."""
