"""From results folders to a report: tables in the paper's form, comparisons, pictures, one page."""
