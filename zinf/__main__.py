"""`python -m zinf` is the `zinf` command."""

import sys

from zinf.cli import main

sys.exit(main())
