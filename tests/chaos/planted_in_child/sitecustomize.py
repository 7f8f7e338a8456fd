"""Puts a planted bug into a broker's process: on PYTHONPATH, with CHAOS_BUG=MODULE:FUNCTION, whose patch is entered when Python starts."""

import importlib
import os

if _bug := os.environ.get("CHAOS_BUG"):
    _module, _, _name = _bug.partition(":")
    getattr(importlib.import_module(_module), _name)().__enter__()
