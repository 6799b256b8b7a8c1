"""The checks are scripts beside this folder; the tests import them by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
