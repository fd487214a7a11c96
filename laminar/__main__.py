"""`python -m laminar` is the `laminar` command."""

import sys

from laminar.cli import main

sys.exit(main())
