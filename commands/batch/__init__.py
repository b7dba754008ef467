"""`specdec batch`: a file of requests becomes a file of results, on one machine or on Ray."""
