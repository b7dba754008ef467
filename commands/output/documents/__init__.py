"""Records of the JSON documents (`--json`), from which the schemas are generated."""
