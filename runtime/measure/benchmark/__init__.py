"""Load on a server: arrivals, an HTTP client, results."""
