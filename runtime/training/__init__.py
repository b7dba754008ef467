"""Training of heads: the unrolled loss, the file of hidden states, runs that can be interrupted and resumed."""
