"""One training of a case of the product by each trainer, with what it has shown: evaluated, saved, chosen, loaded."""

import lightning
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from product import EVERY, OPTIMIZERS, Seen, name_once, plain, weights
from safetensors.torch import load_file
from tiny_networks import Examples, make
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from wideflat.integrations import huggingface
from wideflat.integrations import lightning as light

#: Evaluations, and examples in a mini-batch.
EVALUATIONS, BATCH = 2, 4
STEPS = EVALUATIONS * EVERY


def data(case):
    """Mini-batches of one epoch, which ends with an evaluation; and the batch that it is of."""
    examples = Examples(case.network, BATCH * EVERY * case.accumulated)
    return examples, Examples(case.network, 8, seed=2)


# ----------------------------------------------------------------------------------------------- Hugging Face's Trainer


class InOrder(Trainer):
    """Takes the examples in their order."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


class Watch(TrainerCallback):
    """Couples, where that is to be done, and keeps what is there; it comes before FocusingCallback."""

    def __init__(self, case, seen):
        self.case, self.seen = case, seen

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.case.couple(model, optimizer.optimizer)
        self.seen.note(state.global_step, model, optimizer.optimizer)

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        self.seen.note_evaluation(state.global_step, model, metrics["eval_loss"])


def trainer_settings(case):
    if case.setting == "bf16":
        return {"bf16": True}
    if case.setting == "compiled":
        return {"torch_compile": True, "torch_compile_backend": "eager"}
    return {"gradient_accumulation_steps": case.accumulated, "max_grad_norm": case.clip or 0.0}


def trainer_arguments(folder, **settings):
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        save_steps=EVERY,
        eval_steps=EVERY,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst one: as a rule it is not the last
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **settings,
    )


def by_trainer(case, folder, resume=None):
    seen, model = Seen(), case.make_network()
    if case.optimizer == "Parle":
        model.register_state_dict_post_hook(name_once)
    training, held_out = data(case)
    trainer = InOrder(
        model,
        trainer_arguments(folder, **trainer_settings(case)),
        train_dataset=training,
        eval_dataset=held_out,
        optimizer_cls_and_kwargs=OPTIMIZERS[case.optimizer],
        callbacks=[Watch(case, seen)],
    )
    callback = huggingface.FocusingCallback(factor=10.0 if case.focused else None)
    trainer.add_callback(huggingface.SAMCallback(trainer) if case.optimizer == "SAM" else callback)
    trainer.can_return_loss = True
    trainer.train(resume_from_checkpoint=str(folder.parent / resume / f"checkpoint-{EVERY}") if resume else None)
    seen.best = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    seen.chosen = weights(model)
    for step in seen.losses:
        seen.saved[step] = _trainable(_of_trainer(case, folder / f"checkpoint-{step}"), model)
    trainer.save_model(str(folder / "best"))
    seen.loaded = _trainable(_of_trainer(case, folder / "best"), model)
    return seen


def _of_trainer(case, folder):
    """A network of a checkpoint, as one makes it for inference."""
    if case.optimizer == "Parle":
        model = case.make_network()
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        return model
    if case.lora:
        return PeftModel.from_pretrained(make(case.network), folder)
    return type(make(case.network)).from_pretrained(folder)


def _trainable(loaded, model):
    named = dict(loaded.named_parameters())
    return {name: named[name].detach().clone() for name in weights(model)}


# ----------------------------------------------------------------------------------------------------------- Accelerate


def by_accelerate(case, folder, resume=None):
    seen, parts = Seen(), _prepared(case)
    accelerator, model, opt, _ = parts
    first = 0
    if resume:
        first = 1
        accelerator.load_state(folder.parent / resume / f"step-{EVERY}")
    (held_out,) = DataLoader(data(case)[1], 8)
    for epoch in range(first, EVALUATIONS):
        if case.optimizer != "SAM":
            opt.train()
        _epoch(case, parts, seen, epoch * EVERY)
        step = (epoch + 1) * EVERY
        if case.optimizer != "SAM":
            opt.eval()
        with torch.no_grad(), accelerator.autocast():
            seen.note_evaluation(step, model, model(**held_out)["loss"])
        accelerator.save_state(folder / f"step-{step}")
        seen.saved[step] = _of_accelerate(case, folder / f"step-{step}", model)
    seen.best = max(seen.losses, key=seen.losses.get)
    accelerator.load_state(folder / f"step-{seen.best}")
    seen.chosen = weights(model)
    seen.loaded = seen.saved[seen.best]
    return seen


def _prepared(case):
    precision = {"bf16": {"mixed_precision": "bf16"}, "compiled": {"dynamo_backend": "eager"}}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulated, **precision.get(case.setting, {}))
    model = case.make_network()
    opt = case.make_optimizer(model.parameters())
    return accelerator, *accelerator.prepare(model, opt, DataLoader(data(case)[0], BATCH))


def _epoch(case, parts, seen, step):
    accelerator, model, opt, loader = parts
    window = []
    for batch in loader:
        window.append(batch)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients and case.optimizer == "SAM":
                if opt.optimizer.perturb(accelerator.scaler):
                    for again in window:
                        accelerator.backward(model(**again)["loss"])
                opt.optimizer.restore()
            if accelerator.sync_gradients and case.clip:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            opt.step()
            opt.zero_grad()
        if accelerator.sync_gradients:
            step, window = step + 1, []
            case.couple(model, opt.optimizer)
            seen.note(step, model, opt.optimizer)


def _of_accelerate(case, folder, model):
    """A fresh network with the weights of a saved state."""
    fresh = case.make_network()
    fresh.load_state_dict(plain(load_file(folder / "model.safetensors")), strict=False)
    return _trainable(fresh, model)


# ------------------------------------------------------------------------------------------------------------ Lightning


class Module(lightning.LightningModule):
    """Any case; with SAM and accumulation by hand, since Lightning's own is refused for it."""

    def __init__(self, case, seen):
        super().__init__()
        self.case, self.seen = case, seen
        self.model = case.make_network()
        if case.setting == "compiled":
            self.model = torch.compile(self.model, backend="eager")
        self.automatic_optimization = case.optimizer != "SAM" or case.accumulated == 1
        self.window = []

    def training_step(self, batch, number):
        if self.automatic_optimization:
            return self.model(**batch)["loss"]
        self.window.append(batch)
        opt = self.optimizers()
        self._backward(batch)
        if len(self.window) == self.case.accumulated:
            if opt.perturb():
                for again in self.window:
                    self._backward(again)
            opt.restore()
            self.clip_gradients(opt, self.case.clip)
            opt.step()
            opt.zero_grad()
            self.window = []
        return None

    def _backward(self, batch):
        self.manual_backward(self.model(**batch)["loss"] / self.case.accumulated)

    def validation_step(self, batch, _):
        loss = self.model(**batch)["loss"]
        self.log("val_loss", loss)
        self.seen.note_evaluation(self.trainer.global_step, self.model, loss)

    def configure_optimizers(self):
        return self.case.make_optimizer(self.parameters())


class LightningWatch(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % module.case.accumulated == 0:
            optimizer = trainer.optimizers[0]
            module.case.couple(module.model, optimizer)
            module.seen.note(trainer.global_step, module.model, optimizer)


def by_lightning(case, folder, resume=None):
    seen = Seen()
    module = Module(case, seen)
    best = ModelCheckpoint(folder, filename="best-{step}", monitor="val_loss", mode="max")
    every = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
    settings = {"precision": "bf16-mixed"} if case.setting == "bf16" else {}
    if case.accumulated > 1 and module.automatic_optimization:
        settings = {"accumulate_grad_batches": case.accumulated, "gradient_clip_val": case.clip}
    callback = light.FocusingCallback(factor=10.0 if case.focused else None)
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=EVALUATIONS,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningWatch(), best, every, *([] if case.optimizer == "SAM" else [callback])],
        **settings,
    )
    loaders = DataLoader(data(case)[0], BATCH), DataLoader(data(case)[1], 8)
    path = folder.parent / resume / f"step={EVERY}.ckpt" if resume else None
    trainer.fit(module, *loaders, ckpt_path=path, weights_only=True)
    for step in seen.losses:
        seen.saved[step] = _of_lightning(case, folder / f"step={step}.ckpt")
    seen.best = int(best.best_model_path.rpartition("=")[2].removesuffix(".ckpt"))
    seen.loaded = _of_lightning(case, best.best_model_path)
    module.seen = Seen()
    trainer.validate(module, loaders[1], ckpt_path=best.best_model_path, weights_only=True, verbose=False)
    (seen.chosen,) = module.seen.evaluated.values()
    return seen


def _of_lightning(case, path):
    """A fresh module with the weights of a checkpoint."""
    module = Module(case, Seen())
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=False)
    return weights(module.model)


DRIVERS = {"Trainer": by_trainer, "Accelerate": by_accelerate, "Lightning": by_lightning}
