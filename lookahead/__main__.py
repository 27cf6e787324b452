"""``python -m lookahead``."""

from lookahead.cli import main

main(prog_name="lookahead")
