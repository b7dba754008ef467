"""`specdec summarize`: scores and times an engine on a dataset, beside Hugging Face."""
