"""`python -m bench.published`."""

from bench.published.command import main

main()
