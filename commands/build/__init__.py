"""`specdec build`: a checkpoint becomes an engine."""
