"""`specdec schema`: prints the JSON schema of a command's document."""
