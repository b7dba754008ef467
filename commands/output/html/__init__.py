"""Pages that `--report` writes, by Jinja templates."""
