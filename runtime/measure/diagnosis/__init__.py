"""Diagnosis of the causes that limit the speed on this machine: `observe.py` measures, `diagnose.py` judges."""
