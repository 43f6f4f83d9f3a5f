"""What is measured: the examples that are chosen, whatever holds them."""

from wideflat import card
from wideflat.cards import measures, measuring


def test_a_loader_and_a_data_set(subject, monkeypatch):
    from torch.utils.data import DataLoader, TensorDataset

    model, data = subject
    monkeypatch.setattr(measuring, "MEASURES", measures.MEASURES[:1])
    pairs = TensorDataset(*data)
    for given in (data, pairs, DataLoader(pairs, batch_size=7), list(DataLoader(pairs, batch_size=7))):
        found = card(model, given, quick=True, examples=4, progress=False)
        assert found["at_w"].examples == 16 and found.conventions["few"] == 4
