"""`specdec tune`: finds the drafter and the draft length that pay."""
