"""Tables in the terminal that several commands show: drafts, and the lossless check."""
