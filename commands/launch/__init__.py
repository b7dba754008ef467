"""`specdec launch`: a coding agent on a model of this machine, with a server that is started and ended for it."""
