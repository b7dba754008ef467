"""The search for settings that pay: by replay of recorded outputs, then by running the best."""
