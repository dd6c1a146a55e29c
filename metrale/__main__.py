"""`python -m metrale`: the command line."""

import sys

from metrale.cli.main import main

sys.exit(main())
