"""A network evaluated on data with a metric, and left exactly as it was found."""
