"""Diagnosis of what limits the speed on this machine: `observe.py` measures, `diagnose.py` judges."""
