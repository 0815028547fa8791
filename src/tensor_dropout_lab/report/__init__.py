"""The report: tables and figures of the paper beside ours, from records alone."""
