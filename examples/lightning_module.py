"""Lightning: the optimizer from configure_optimizers, and a callback that validates and keeps the center.

python examples/lightning_module.py --epochs 5
"""

import argparse
import warnings

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import wideflat
from wideflat.data import dress_coat
from wideflat.integrations.lightning import FocusingCallback

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
epochs = parser.parse_args().epochs

patterns = dress_coat.load(500)
train = TensorDataset(patterns.inputs, (patterns.targets > 0).long())
test = TensorDataset(patterns.test_inputs, (patterns.test_targets > 0).long())


class Network(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("error", (self.model(x).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        return wideflat.EntropySGD(self.parameters(), lr=0.5, inner_lr=0.02)


torch.manual_seed(0)
warnings.filterwarnings("ignore")  # Lightning advises more workers for these tiny loaders
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[FocusingCallback(factor=10)], **quiet)
trainer.fit(Network(), DataLoader(train, batch_size=50, shuffle=True), DataLoader(test, batch_size=500))
print(f"validation error of the center: {100 * trainer.callback_metrics['error']:.1f} %")
