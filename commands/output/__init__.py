"""Output in the terminal: text, progress bars and help panels, and the folders of tables, JSON records and pages."""
