"""Hugging Face's Trainer: the center is what it evaluates, saves and ends with.

python examples/huggingface_trainer.py --steps 200
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import wideflat
from wideflat.integrations.huggingface import FocusingCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps


class Sums(Dataset):
    """Eight small numbers; the label says whether their sum is large."""

    def __init__(self, count: int, seed: int) -> None:
        self.numbers = torch.randint(10, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.numbers[i], "labels": (self.numbers[i].sum() > 36).long()}


torch.manual_seed(0)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=10, max_position_embeddings=8, **size))
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(folder, max_steps=steps, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"),
        train_dataset=Sums(512, seed=0),
        eval_dataset=Sums(256, seed=1),
        optimizer_cls_and_kwargs=(wideflat.EntropySGD, {"lr": 0.5, "inner_lr": 0.02}),
        callbacks=[FocusingCallback(factor=10.0)],
    )
    trainer.train()
    print("loss of the center:", round(trainer.evaluate()["eval_loss"], 3))
