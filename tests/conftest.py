"""Every test runs with poisoned buffers and checked plans; rank processes inherit both."""

import os

os.environ["EVENEP_POISON"] = "1"
os.environ["EVENEP_DEBUG"] = "1"
