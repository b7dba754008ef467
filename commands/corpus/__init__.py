"""`specdec corpus`: makes, merges and describes the files that n-gram lookup searches."""
