"""`specdec compare`: two JSON documents side by side."""
