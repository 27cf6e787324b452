"""The protocol of sources of guesses, the n-gram pool as one, and how many guesses are verified."""
