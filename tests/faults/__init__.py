"""Wrong lines that are put into the source one by one: a suite is there for those it notices."""
