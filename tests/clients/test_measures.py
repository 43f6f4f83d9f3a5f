"""Transformers in the measures: dictionaries against a loop by hand, padding, -100, tied weights, LoRA, replicas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from tiny_networks import WORDS, Examples, make
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BertForMaskedLM, BertForTokenClassification, DataCollatorWithPadding

import wideflat
from wideflat.hessian.curvature import curvature
from wideflat.landscape.worst_case import worst_case

# peft asks transformers for a name that transformers has given up.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SHIFTED = {"gpt2", "llama"}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def trained(name, lora=False):
    """A few steps away from the start, so that no weight is zero, and not larger than a measure likes."""
    model = make(name, lora).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@torch.no_grad()
def by_hand(model, data, shifted):
    """Loss and error of each example, the positions that count counted alike, then the mean over examples."""
    losses, errors = [], []
    for row in range(len(data["labels"])):
        one = {name: value[row : row + 1] for name, value in data.items()}
        logits, labels = model(**one).logits[0], one["labels"][0]
        if shifted:
            logits, labels = logits[:-1], labels[1:]
        logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        counts = labels != -100
        losses.append(F.cross_entropy(logits[counts], labels[counts]))
        errors.append((logits[counts].argmax(-1) != labels[counts]).double().mean())
    return torch.stack(losses).mean().item(), torch.stack(errors).mean().item()


def at(model, data, metric="loss", sigmas=(0.0,), **settings):
    return wideflat.local_energy(model, data, list(sigmas), metric=metric, progress=False, max_passes=1, **settings)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_the_energy_is_that_of_a_loop_by_hand(name):
    model, data = trained(name), Examples(name, 6).batch()
    if name not in ("bert", "vit"):
        data["labels"][::2, -3:] = -100
    loss, error = by_hand(model, data, name in SHIFTED)
    assert at(model, data).baseline == pytest.approx(loss, rel=1e-5)
    assert at(model, data, "error").baseline == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("network", [BertForMaskedLM, BertForTokenClassification])
def test_masked_words_and_classes_of_words(network):
    torch.manual_seed(0)
    model = network(BertConfig(vocab_size=WORDS, **SIZES, max_position_embeddings=16, num_labels=3)).eval()
    data = Examples("gpt2", 6).batch()
    data["labels"] = data["labels"].where(torch.rand(6, 8) < 0.5, -100)
    data["labels"][:, 1] = 2
    if network is BertForTokenClassification:
        data["labels"] = data["labels"].where(data["labels"] < 0, data["labels"] % 3)
    loss, error = by_hand(model, data, shifted=False)
    assert at(model, data).baseline == pytest.approx(loss, rel=1e-5)
    assert at(model, data, "error").baseline == pytest.approx(error, abs=1e-6)


def perturbed(model, data, sigma, seed, shifted):
    """The loss at w + sigma z * w of one z, tied weights once."""
    there = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in there.parameters():
            if p.requires_grad:
                p.mul_(1 + sigma * torch.randn(p.shape, generator=generator))
    return by_hand(there, data, shifted)[0]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_rise_with_noise_is_that_of_a_loop_by_hand(name, lora):
    """Tied weights (the words that go in and come out) have one noise; of LoRA the adapters alone have any."""
    model, data, sigma = trained(name, lora), Examples(name, 4).batch(), 0.3
    selection = {"parameters": "trainable"} if lora else {}
    profile = wideflat.local_energy(
        model, data, [sigma], metric="loss", noise="pass", max_passes=60, progress=False, **selection
    )
    draws = torch.tensor([perturbed(model, data, sigma, seed, name in SHIFTED) for seed in range(60)])
    rise, error = draws.mean().item() - profile.baseline, draws.std().item() / 60**0.5
    assert abs(profile.mean[0] - rise) < 4 * (profile.stderr[0] ** 2 + error**2) ** 0.5
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert profile.conventions["perturbed"] == trainable


def padded(data, name, extra=3):
    """The same examples with positions that do not count, at the end."""
    batch = {key: F.pad(value, (0, extra), value={"labels": -100}.get(key, 0)) for key, value in data.items()}
    if name == "bert":
        batch["labels"] = data["labels"]
    return batch


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_padding_changes_nothing(name):
    model, data = trained(name), Examples(name, 4).batch()
    more = padded(data, name)
    for sigma in (0.0, 0.2):
        ours, theirs = (at(model, batch, sigmas=(sigma,), seed=1) for batch in (data, more))
        assert ours.baseline == pytest.approx(theirs.baseline, abs=1e-6)
        assert ours.mean[0] == pytest.approx(theirs.mean[0], abs=1e-6)


class Pad:
    """What a collator of Hugging Face needs of a tokenizer."""

    padding_side, model_input_names, deprecation_warnings = "right", ["input_ids"], {}

    def pad(self, features, return_tensors=None, **_):
        longest = max(len(one["input_ids"]) for one in features)
        lines = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in features]
        mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in features]
        return {
            "input_ids": torch.tensor(lines),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor([one["labels"] for one in features]),
        }


def test_a_loader_with_a_collator_of_hugging_face():
    model, examples = trained("bert"), Examples("bert", 6)
    lines = [
        {"input_ids": line[: 4 + row % 4].tolist(), "labels": label.item()}
        for row, (line, label) in enumerate(zip(examples.inputs, examples.labels, strict=True))
    ]
    loader = torch.utils.data.DataLoader(lines, batch_size=2, collate_fn=DataCollatorWithPadding(Pad()))
    losses = [by_hand(model, batch, shifted=False)[0] for batch in loader]
    assert at(model, loader).baseline == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_worst_point_and_the_curvature_of_a_language_model():
    model, data = trained("llama"), Examples("llama", 4).batch()
    assert worst_case(model, data, [0.01], metric="loss", progress=False).mean[0] > 0
    trace = curvature(model, data, top=1, probes=100, scale="absolute", progress=False)
    params = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        losses = [model(**{key: value[row : row + 1] for key, value in data.items()}).loss for row in range(4)]
    gradients = torch.autograd.grad(torch.stack(losses).mean(), params, create_graph=True)
    generator, samples = torch.Generator().manual_seed(0), []
    for _ in range(100):
        z = [torch.randint(2, p.shape, generator=generator) * 2.0 - 1 for p in params]
        product = torch.autograd.grad(gradients, params, z, retain_graph=True)
        samples.append(sum((a * b).sum() for a, b in zip(z, product, strict=True)).item())
    samples = torch.tensor(samples)
    error = (samples.var() / 100 + trace.trace_stderr**2) ** 0.5
    assert abs(trace.trace - samples.mean()) < 4 * error


class Normed(nn.Module):
    """A network of names with batch norm in it."""

    def __init__(self):
        super().__init__()
        self.language, self.norm = make("bert"), nn.BatchNorm1d(3)

    def forward(self, **batch):
        return self.norm(self.language(**batch).logits)


def test_batch_norm_is_refreshed_with_dictionaries():
    model, batches = Normed().eval(), [Examples("bert", 8, seed=seed).batch() for seed in (1, 2)]
    wideflat.refresh_batch_norm(model, batches)
    with torch.no_grad():
        means = [model.language(**batch).logits.mean(0) for batch in batches]
    torch.testing.assert_close(model.norm.running_mean, torch.stack(means).mean(0))


def test_replicas_of_a_language_model():
    torch.manual_seed(0)
    seeds = iter(range(3))

    def network():
        model = make("gpt2").eval()
        torch.manual_seed(next(seeds))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        return model

    replicas = wideflat.Replicas(network, 3)
    loader = torch.utils.data.DataLoader(Examples("gpt2", 8), batch_size=4)
    (batches, _) = replicas.batches(loader)
    expected = sum(model(**batch).loss for model, batch in zip(replicas, batches, strict=True))
    torch.testing.assert_close(replicas.loss(batches), expected)
    shown = replicas.ensemble(batches[0])
    torch.testing.assert_close(shown, torch.stack([m(**batches[0]).logits.softmax(-1) for m in replicas]).mean(0))
    torch.testing.assert_close(shown.sum(-1), torch.ones(4, 8))
    torch.testing.assert_close(replicas.ensemble(batches[0]["input_ids"]), shown)


class Wrapped(nn.Module):
    """A language model that returns its loss and its logits in some form."""

    def __init__(self, form):
        super().__init__()
        self.language, self.form = trained("gpt2"), form

    def forward(self, **batch):
        out = self.language(**batch)
        return self.form(out.loss, out.logits)


@pytest.mark.parametrize(
    "form",
    [
        lambda loss, logits: (loss, logits),
        lambda loss, logits: [loss.reshape(1), logits, "more"],
        lambda loss, logits: {"loss": loss, "logits": logits},
    ],
    ids=["tuple", "list", "dictionary"],
)
def test_outputs_without_a_class_of_their_own(form):
    data = Examples("gpt2", 4).batch()
    assert at(Wrapped(form).eval(), data).baseline == at(trained("gpt2"), data).baseline


def test_outputs_that_are_not_recognised_are_refused_with_the_lines_that_do_it():
    data = Examples("gpt2", 4).batch()
    with pytest.raises(
        TypeError, match=r"the keys scores. Say where(.|\n)*model\(\*\*batch\)(.|\n)*batch\[\"labels\"\]"
    ):
        at(Wrapped(lambda loss, logits: {"scores": logits}).eval(), data)
    with pytest.raises(ValueError, match="returned no loss"):
        at(Wrapped(lambda loss, logits: (logits,)).eval(), data)

    def forward(model, batch):
        outputs = model(**batch)["scores"]
        return outputs[:, :-1], batch["labels"][:, 1:]

    measured = at(Wrapped(lambda loss, logits: {"scores": logits}).eval(), data, forward=forward)
    assert measured.baseline == pytest.approx(at(trained("gpt2"), data).baseline, rel=1e-6)
    with pytest.raises(TypeError, match=r"a dictionary with labels; for a dict of 1 give forward=(.|\n)*def forward"):
        at(trained("gpt2"), {"input_ids": data["input_ids"]})


class Unlabelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, input_ids):
        return self.norm(self.layer(input_ids.float()))


def test_a_network_that_does_not_take_the_whole_dictionary_is_told_which_lines_do_it():
    data, net = Examples("bert", 4).batch(), Unlabelled().eval()
    with pytest.raises(TypeError, match=r"does not take all of input_ids(.|\n)*def forward\(model(.|\n)*labels"):
        at(net, data)
    at(net, data, forward=lambda model, batch: (model(batch["input_ids"]), batch["labels"]))
    with pytest.raises(TypeError, match=r"all of a batch by name(.|\n)*pass forward="):
        wideflat.refresh_batch_norm(net, [data])


def test_layers_of_adapters_alone():
    model, data = trained("gpt2", lora=True), Examples("gpt2", 4).batch()
    settings = {"metric": "loss", "max_passes": 1, "progress": False}
    profiles = wideflat.layer_profiles(model, data, [0.1], parameters="trainable", **settings)
    assert profiles and all("lora_" in layer for layer in profiles)
    with pytest.raises(ValueError, match="give layers="):
        wideflat.layer_profiles(model, data, [0.1], parameters="weights", **settings)


def test_a_network_that_accelerate_has_dispatched():
    dispatched = dispatch_model(trained("llama"), {"": "cpu"}, force_hooks=True)
    data = Examples("llama", 4).batch()
    ours, theirs = (at(model, data, sigmas=(0.2,), seed=1) for model in (dispatched, trained("llama")))
    assert (ours.baseline, ours.mean[0]) == (theirs.baseline, theirs.mean[0])


@pytest.mark.parametrize("measure", ["worst_case", "curvature", "layer_profiles", "shift_profile", "slices"])
def test_padding_changes_nothing_in_other_measures(measure):
    data = Examples("llama", 4).batch()
    values = []
    for batch in (data, padded(data, "llama")):
        model = trained("llama")
        if measure == "worst_case":
            values.append(worst_case(model, batch, [0.01], metric="loss", progress=False).mean[0])
        elif measure == "curvature":
            values.append(curvature(model, batch, top=1, probes=2, scale="absolute", progress=False).trace)
        elif measure == "shift_profile":
            values.append(wideflat.shift_profile(model, batch, quantize=[4], metric="loss", progress=False).mean[0])
        elif measure == "slices":
            values.append(wideflat.slices(model, batch, positions=[-1, 0], dimensions=1, progress=False).mean[0])
        else:
            options = {"metric": "loss", "progress": False, "max_passes": 1}
            layers = ["model.layers.0.mlp.gate_proj"]
            found = wideflat.layer_profiles(model, batch, [0.1], layers, **options)
            values.append(next(iter(found.values())).mean[0])
    assert values[0] == pytest.approx(values[1], abs=1e-6, rel=1e-6)


@pytest.mark.slow  # some seven seconds of one core
def test_a_card_of_a_language_model():
    """Every measure takes the dictionary; E(w) of the loss is the network's own."""
    model, data = trained("gpt2"), Examples("gpt2", 6).batch()
    card = wideflat.card(model, data, quick=True, examples=4, metric="loss", progress=False)
    assert not card.refused
    with torch.no_grad():
        assert card["at_w"].loss == pytest.approx(float(model(**data).loss), abs=1e-6)
