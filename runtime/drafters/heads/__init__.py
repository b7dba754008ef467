"""Trained drafters that read the target's hidden states: MTP, EAGLE-3, assistants, DFlash."""
