"""What a process of chaos begins with, if this folder is on PYTHONPATH:

    CHAOS_BUG=MODULE:FUNCTION    a planted bug, whose patch is entered when Python starts
    CHAOS_CLOCK=FILE             a wall clock that `stepped_clock.SteppedClock` sets
"""

import importlib
import os

if _bug := os.environ.get("CHAOS_BUG"):
    _module, _, _name = _bug.partition(":")
    getattr(importlib.import_module(_module), _name)().__enter__()
if _clock := os.environ.get("CHAOS_CLOCK"):
    importlib.import_module("tests.chaos.stepped_clock").follow(_clock)
