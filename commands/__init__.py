"""The command line: from flags to requests, and from records to tables, JSON documents and pages."""
