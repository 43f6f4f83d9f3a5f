"""The experiments of the paper, one module per table and figure: compute, write a table, draw from the table."""
