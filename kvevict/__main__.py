"""``python -m kvevict`` is the command ``kvevict``."""

import sys

from kvevict.cli import main

sys.exit(main())
