"""Measurements that commands report. Rooms that generate text do not import them."""
