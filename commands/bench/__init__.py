"""`specdec bench`: sends load to a server and reports latency and throughput."""
