"""`specdec cache`: lists the engines that `--model-dir` made, and removes the oldest."""
