"""Diagnosis: what limits the speed on this machine, measured and explained."""
