"""`specdec doctor`: measures what limits the speed, and names a remedy for each finding."""
