"""rSGD x y: Replicated-SGD over as many epochs as the baseline has."""

import dataclasses

from wideflat.algorithms import rsgd

ALGORITHM = dataclasses.replace(
    rsgd.ALGORITHM, name="rsgdxy", words="Replicated-SGD, every replica sees as much data as the baseline"
)
