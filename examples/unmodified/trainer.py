"""A small GPT-2 learns to write Python's documentation, with the Trainer of transformers.

    python examples/unmodified/trainer.py --lr 3e-3 --epochs 1

The model starts from a configuration, with random weights, and reads single characters. The text
is what `help()` shows on Python's own topics; it is part of every Python.
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BLOCK = 32  # characters in a training example
EXAMPLES = 8000


def load_blocks() -> tuple[list[dict[str, torch.Tensor]], int]:
    text = "".join(topics[name] for name in sorted(topics))[: BLOCK * EXAMPLES]
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    blocks = torch.tensor([index[character] for character in text]).view(-1, BLOCK)
    return [{"input_ids": block, "labels": block} for block in blocks], len(alphabet)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on characters")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    set_seed(args.seed)
    dataset, vocabulary = load_blocks()
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=BLOCK,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            learning_rate=args.lr,
            weight_decay=0.01,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=128,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=training_args,
            train_dataset=dataset,
            eval_dataset=dataset,
        )
        trainer.train()
        metrics = trainer.evaluate()
    print(f"Final train loss: {metrics['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
