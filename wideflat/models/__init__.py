"""The architectures of Table 1 and of the correlation figure, each a function of ``num_classes``."""
