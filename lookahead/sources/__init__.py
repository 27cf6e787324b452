"""Sources of guesses beside the pool. They know `lookahead.extending` alone, as a source of your own would."""
