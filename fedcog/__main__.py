"""`python -m fedcog`."""

import sys

from fedcog.cli import main

sys.exit(main())
