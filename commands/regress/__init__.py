"""`specdec regress`: the tokens of old answers that a changed engine would choose otherwise."""
