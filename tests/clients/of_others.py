"""What peft, Lightning, transformers and the compiler of torch say of themselves: tests of them do not listen to it."""

import pytest

#: Lightning calls torch functions that torch 2.13 deprecates, and reports on loaders without workers and on going on in
#: another folder, or in that of the first run. peft asks transformers for a name that transformers has given up.
WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        ".*is_gradient_checkpointing:FutureWarning",
        ":DeprecationWarning:lightning.*",
        ":FutureWarning:lightning.*",
        ".*LeafSpec.*:FutureWarning",
        ".*does not have many workers.*",
        "Checkpoint directory .* exists and is not empty",
        "The dirpath has changed",
        "The number of training batches.*",
        "The .grad attribute of a Tensor that is not a leaf",
    )
]
