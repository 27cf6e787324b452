"""What a model's layers can do, their attention and their cache."""
