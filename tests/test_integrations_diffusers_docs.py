"""The recipe for diffusers in docs/trainers.md runs as it is printed."""

import pytest
import torch
from pages import blocks, sections
from torch.utils.data import DataLoader, TensorDataset

from mechanic.torch import tuner

pytest.importorskip("diffusers")
from test_integrations_diffusers import PICTURES, WORDS, Training

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.nightly]

STEPS = 40


def test_the_unet_and_the_text_encoder_learn_a_rate_each(capsys):
    models = Training()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(PICTURES.repeat(STEPS, 1, 1, 1), WORDS.repeat(STEPS, 1)), 4)
    names = {"torch": torch, "unet": models.unet, "text_encoder": models.text, "loader": loader}
    (recipe,) = blocks(sections("docs/trainers.md")["diffusers"])
    exec(recipe.code, names)
    printed = capsys.readouterr().out
    for name in ("scale/unet", "scale/text", "lr/unet", "lr/text"):
        assert f"'mechanic/{name}': " in printed
    scopes = tuner(names["optimizer"]).scopes
    rates = {name: float(own.scale) for name, own in scopes.items()}
    assert rates["unet"] > 1e-5 < rates["text"] != rates["unet"]
    assert int(scopes["unet"].metrics()["steps"]) == STEPS
