"""`specdec doctor`: measures the causes of slowness, and names a remedy for each finding."""
