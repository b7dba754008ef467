"""`specdec drafters`: which draft fits a model, each with its speed here and the command to type."""
