"""One table or figure of the paper at a time: from recipes and records to a section of the report."""
