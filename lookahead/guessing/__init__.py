"""Where guesses come from, and how many are verified."""
