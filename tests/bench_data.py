"""A folder with something of everything that the bench reads, in the forms people have it in."""

import pickle
from pathlib import Path

import numpy as np
import torch

from mechanic.bench.data import Data
from mechanic.bench.suites import convex, finetune


def make_folder(folder: Path) -> Data:
    """Fill a folder; small, and drawn at random."""
    random = np.random.default_rng(0)
    _tables(folder, random)
    _images(folder, random)
    _sentences(folder, random)
    _encoder(folder / "models" / finetune.ENCODER)
    return Data(folder)


def _tables(folder: Path, random: np.random.Generator) -> None:
    for name in set(convex.PROBLEMS) - {"iris", "wine"}:
        lines = []
        for row in range(90):
            x = random.normal(size=3) + (row % 3 == np.arange(3))
            lines.append(f"{row % 3} " + " ".join(f"{k + 1}:{v:.3f}" for k, v in enumerate(x)))
        (folder / f"{name}.scale").write_text("\n".join(lines) + "\n")


def _images(folder: Path, random: np.random.Generator) -> None:
    for place, labels, names, classes in (
        ("cifar-10-batches-py", b"labels", ("data_batch_1", "data_batch_3", "test_batch"), 10),
        ("cifar-100-python", b"fine_labels", ("train", "test"), 100),
    ):
        (folder / place).mkdir()
        for name in names:
            planes = random.integers(0, 256, (200, 3072), dtype=np.uint8)
            batch = {b"data": planes, labels: [classes - 1 - k // 2 % classes for k in range(200)]}
            (folder / place / name).write_bytes(pickle.dumps(batch, protocol=4))


def _sentences(folder: Path, random: np.random.Generator) -> None:
    def sentence() -> str:
        return " ".join(random.choice(list("abcdefghij"), random.integers(2, 12)))

    rows = {
        "SST-2": ("sentence\tlabel\n", lambda k: f"{sentence()}\t{k % 2}\n"),
        "CoLA": ("", lambda k: f"x\t{k % 2}\t\t{sentence()}\n"),
        "RTE": (
            "index\tsentence1\tsentence2\tlabel\n",
            lambda k: f"{k}\t{sentence()}\t{sentence()}\t{'not_' * (k % 2)}entailment\n",
        ),
    }
    for name, (header, row) in rows.items():
        (folder / name).mkdir()
        for split in ("train", "dev"):
            # An odd number, so that every other row does not mean every other label.
            text = header + "".join(row(k) for k in range(41))
            (folder / name / f"{split}.tsv").write_text(text)
    for name, valid in (("multi30k", "val"), ("iwslt14", "valid")):
        (folder / name).mkdir()
        for file in (f"{split}.{side}" for split in ("train", valid) for side in ("de", "en")):
            lines = "".join(f"{sentence()}\n" for _ in range(40))
            (folder / name / file).write_text(lines)


def _encoder(folder: Path) -> None:
    """A BERT that is as small as can be, with weights drawn at random."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), num_hidden_layers=1, **sizes)
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    vocabulary = {word: place for place, word in enumerate(words)}
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
