"""Sources of guesses, and how many of their guesses are verified."""
