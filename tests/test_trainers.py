"""The trainers people use take a mechanized optimizer as they take any other, and resume it."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mechanic.torch import mechanize, tuner

# What the trainers and their dependencies warn about among themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(512, 10, generator=GENERATOR)
TARGETS = INPUTS @ torch.randn(10, 1, generator=GENERATOR)


class Net(torch.nn.Module):
    """A linear model, called as transformers' Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(10, 1)

    def forward(self, inputs, labels=None):
        outputs = self.linear(inputs)
        loss = torch.nn.functional.mse_loss(outputs, labels)
        return {"loss": loss, "logits": outputs}


def final_loss(net: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(net(INPUTS), TARGETS))


def make(net: torch.nn.Module) -> torch.optim.Optimizer:
    return mechanize(torch.optim.AdamW(net.parameters(), lr=1.0))


def test_accelerate_with_accumulation_clipping_and_a_scheduler(tmp_path):
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(10, 1)
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 320)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=32)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)

    def epochs(count: int) -> None:
        for _ in range(count):
            for inputs, targets in loader:
                with accelerator.accumulate(net):
                    loss = torch.nn.functional.mse_loss(net(inputs), targets)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    epochs(10)
    accelerator.save_state(tmp_path)
    saved = [param.detach().clone() for param in net.parameters()]
    scale = float(tuner(optimizer).scale)  # through accelerate's wrapper
    epochs(10)
    expected = [param.detach().clone() for param in net.parameters()]
    accelerator.load_state(tmp_path)
    assert all(map(torch.equal, net.parameters(), saved))
    assert float(tuner(optimizer).scale) == scale > 1e-3
    epochs(10)
    assert all(map(torch.equal, net.parameters(), expected))
    assert int(tuner(optimizer).metrics()["steps"]) == 160
    assert final_loss(net) < 0.1


def arguments(folder, epochs: int):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )


DATASET = [{"inputs": x, "labels": y} for x, y in zip(INPUTS, TARGETS, strict=True)]


def test_transformers_trainer_stops_and_resumes(tmp_path):
    from transformers import Trainer

    def trainer(epochs: int) -> Trainer:
        torch.manual_seed(0)
        net = Net()
        optimizer = make(net)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
        return Trainer(
            model=net,
            args=arguments(tmp_path, epochs),
            train_dataset=DATASET,
            optimizers=(optimizer, scheduler),
        )

    first = trainer(4)
    first.train()
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=True)
    assert int(tuner(resumed.optimizer).metrics()["steps"]) == 6 * 16
    assert float(tuner(first.optimizer).scale) > 1e-3
    assert final_loss(resumed.model.linear) < 0.05
    assert final_loss(first.model.linear) < 1


def test_transformers_trainer_makes_the_optimizer_from_the_class(tmp_path):
    from transformers import Trainer

    torch.manual_seed(0)
    trainer = Trainer(
        model=Net(),
        args=arguments(tmp_path, 6),
        train_dataset=DATASET,
        optimizer_cls_and_kwargs=(mechanize(torch.optim.AdamW), {"lr": 1.0}),
    )
    trainer.train()
    assert float(tuner(trainer.optimizer).scale) > 1e-3
    assert final_loss(trainer.model.linear) < 0.5


def test_lightning_stops_and_resumes(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(10, 1)

        def training_step(self, batch, _):
            inputs, targets = batch
            return torch.nn.functional.mse_loss(self.net(inputs), targets)

        def configure_optimizers(self):
            optimizer = make(self)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def fit(epochs: int, checkpoint=None):
        torch.manual_seed(0)
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            gradient_clip_val=1.0,
        )
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=32)
        trainer.fit(module, loader, ckpt_path=checkpoint)
        return module, trainer

    whole, whole_trainer = fit(8)
    _, half_trainer = fit(4)
    half_trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, resumed_trainer = fit(8, tmp_path / "half.ckpt")
    assert float(tuner(whole_trainer.optimizers[0]).scale) > 1e-3
    assert int(tuner(resumed_trainer.optimizers[0]).metrics()["steps"]) == 8 * 16
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert final_loss(resumed.net) < 0.1
