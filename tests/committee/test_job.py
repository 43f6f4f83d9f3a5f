"""Groups of restarts: who is in one changes nothing, and those who were ahead come back."""

import pytest
import torch

from wideflat.committee import SETTINGS, train
from wideflat.committee.job import FORMS, Group, center
from wideflat.committee.settings import KINDS


def test_every_algorithm_has_every_form():
    assert all(set(by_algorithm) == set(KINDS) for by_algorithm in FORMS.values())


def test_the_center_is_the_barycenter_with_units_of_norm_one():
    weights = torch.tensor([[[3.0, 0.0]], [[1.0, 2.0]]])  # two replicas of one unit
    assert torch.allclose(center(weights), torch.tensor([[2.0, 1.0]]) / 5**0.5)


@pytest.mark.parametrize("batch_size", [16, 20, 60])
@pytest.mark.parametrize("form", ["gram", "direct"])
def test_the_number_of_neighbours_changes_nothing(form, batch_size, images):
    """Bit for bit in float32: in an odd group too, whose last numbers do not fill a vector of the processor."""
    setting = SETTINGS["sgd-fast"].replace(batch_size=batch_size, max_epochs=6, dropout=0.2)
    run = {"progress": False, "threads": 1, "form": form}
    whole = train(setting, images.inputs, images.targets, range(5), **run)
    for count in (1, 2, 3, 4):
        some = train(setting, images.inputs, images.targets, range(5 - count, 5), **run)
        assert torch.equal(some.weights, whole.weights[5 - count :]), count


def test_those_who_were_ahead_come_back_to_the_others(images, monkeypatch):
    """With two replicas the orders of eight epochs are drawn at a time, and the refresh comes in the middle of them."""
    setting = SETTINGS["rsgd-fast"].replace(num_replicas=2, batch_size=20, max_epochs=30)
    came = []

    def once(self, weights):
        came.append((self.epoch, len(weights)))
        if self.epoch == 10:
            self.restarts[0].epoch = 20
            return [0]
        return []

    monkeypatch.setattr(Group, "_skip", once)
    result = train(setting, images.inputs, images.targets, range(3), threads=1, progress=False, refresh=10)
    assert came == [(0, 3), (10, 3), (20, 3)] and result.epochs == [30, 30, 30]
