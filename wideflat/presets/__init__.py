"""Every cell of Table 1 as data: data set, architecture, every hyper-parameter of Appendix C, the paper's number.

A cell is a frozen dataclass, :class:`Preset`. ``preset("cifar10-resnet18", "rsgd")`` gives one; a custom experiment is
``dataclasses.replace(preset(...), lr=0.03)``, or flags of ``wideflat train``.

Appendix C leaves values open. Each value that is ours is named in ``Preset.notes`` with the reason, field by field; a
field without a note is as printed. Table 1 was made with a program, and public copies of that program differ from the
text: ``preset(..., as_coded=True)`` is the cell as these have it, with what differs in ``Preset.coded``.

How much data each algorithm sees (``epochs`` x ``passes_per_epoch`` x ``num_replicas`` = passes over the training set):

========  ==========================  =====================  =====================================================
column    epochs                      passes in an epoch     the same number of passes as the baseline?
========  ==========================  =====================  =====================================================
sgd       as printed                  1                      it is the baseline
rsgd      baseline / y                1 for every replica    yes
esgd      as printed (baseline / L)   L                      yes, but for the rounding of the printed epochs
rsgdxy    as the baseline             1 for every replica    no: every replica sees as much as the baseline
========  ==========================  =====================  =====================================================
"""

from wideflat.presets.resolution import preset
from wideflat.presets.settings import ALGORITHMS, COLUMNS, Preset, nearest
from wideflat.presets.table1 import PRESETS

__all__ = ["ALGORITHMS", "COLUMNS", "PRESETS", "Preset", "nearest", "preset"]
