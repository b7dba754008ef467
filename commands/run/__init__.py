"""`specdec run`: answers prompts, and reports how drafts did."""
