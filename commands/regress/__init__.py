"""`specdec regress`: what a change of an engine changes in old answers, without generating them again."""
