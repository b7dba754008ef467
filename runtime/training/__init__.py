"""Training of heads: the unrolled loss, hidden states, a run that can be interrupted."""
