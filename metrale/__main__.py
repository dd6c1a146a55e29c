"""`python -m metrale`: the command line."""

import sys

try:
    from metrale.cli.main import main
except KeyboardInterrupt:  # Ctrl-C before `main` could see to it
    sys.exit(130)

sys.exit(main())
