"""``python -m tileops.core.cli``."""

from tileops.core.cli import main

main(prog_name="tileops")
