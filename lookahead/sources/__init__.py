"""Sources of guesses in addition to the pool. They use only `lookahead.extending`, as your own source would."""
