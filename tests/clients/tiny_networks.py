"""Tiny networks of the Hugging Face families, built from configurations, and dictionaries to train them on."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

WORDS, LENGTH = 17, 8


def gpt2():
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))


def bert():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, **sizes, max_position_embeddings=16, num_labels=3)
    )


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes, decoder_start_token_id=0))


def vit():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))


NETWORKS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit}
LORA = {
    "gpt2": ["c_attn"],
    "llama": ["q_proj", "v_proj"],
    "bert": ["query", "value"],
    "t5": ["q", "v"],
    "vit": ["q_proj", "v_proj"],
}


def make(name, lora=False):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    if not lora:
        return model
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=LORA[name], fan_in_fan_out=name == "gpt2")
    return get_peft_model(model, config)


class Examples(Dataset):
    """A dictionary for each example, as the network of that name takes it."""

    def __init__(self, name, examples=32, length=LENGTH, seed=1):
        self.name = name
        generator = torch.Generator().manual_seed(seed)
        if name == "vit":
            self.inputs = torch.randn(examples, 3, 8, 8, generator=generator)
            self.labels = (self.inputs.mean((1, 2, 3)) > 0).long()
            return
        self.inputs = torch.randint(2, WORDS, (examples, length), generator=generator)
        self.labels = self.inputs[:, 0] % 3 if name == "bert" else self.inputs.clone()
        if name != "bert":
            self.labels[:, 0] = -100  # nothing comes before it; the Trainer would count it in the mean

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.name == "vit":
            return {"pixel_values": self.inputs[index], "labels": self.labels[index]}
        ids = self.inputs[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[index]}

    def batch(self, rows=slice(None)):
        chosen = [self[index] for index in range(len(self))[rows]]
        return {name: torch.stack([example[name] for example in chosen]) for name in chosen[0]}


def weights(model):
    """Copies of what is trained, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(ours, theirs):
    """Bit for bit, by the same names."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
