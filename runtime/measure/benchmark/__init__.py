"""The load that `bench` sends to a server: arrival times, an HTTP client, results."""
