"""`specdec predict`: what drafters would save on another machine, by its step costs and recorded outputs."""
