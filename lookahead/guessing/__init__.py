"""The protocol of sources, the n-gram pool as one of them, and the number of guesses."""
