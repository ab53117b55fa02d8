"""`python -m nanogpt_tpu` is `nanogpt-tpu`."""

import sys

from nanogpt_tpu.cli import main

sys.exit(main())
