"""The command line and its measurements."""
