"""`python -m fedcog`."""

import sys

from fedcog.cli.main import main

sys.exit(main())
