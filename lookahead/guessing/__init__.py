"""The protocol of sources of guesses, the n-gram pool as a source, and the number of guesses to verify."""
