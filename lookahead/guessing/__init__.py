"""What sources of guesses are, the n-gram pool as one, and how many guesses are verified."""
