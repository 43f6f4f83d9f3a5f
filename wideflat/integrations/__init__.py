"""wideflat inside the trainers of others. Nothing here is imported with ``wideflat``: each module needs its trainer.

`wideflat.integrations.huggingface`: transformers' Trainer. `wideflat.integrations.lightning`: Lightning.
"""
