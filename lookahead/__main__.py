"""``python -m lookahead``."""

from lookahead.tools.cli import main

main(prog_name="lookahead")
