"""`specdec serve`: the HTTP server, from a parsed body to the loop and back."""
