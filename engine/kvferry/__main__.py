"""`python -m kvferry`: the command with the Python that runs, whatever is on PATH."""

import sys

from kvferry.cli import main

sys.exit(main())
