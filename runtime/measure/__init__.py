"""Measurements that commands report; nothing that generates imports them."""
