"""`specdec verify`: compares the files of an engine, checkpoint or corpus with their checksums."""
