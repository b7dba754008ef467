"""`specdec config show`: settings of variables and files, and where each comes from."""
