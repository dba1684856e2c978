"""Every block of code of the README and of the pages for newcomers runs as it is printed.

docs/trainers.md has its own tests, in test_integrations_docs.py, and pages with `>>>` are doctests.
The commands of all pages are in test_docs_commands.py.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mechanic_pytorch
import pytest
import report
import torch
from pages import (
    ROOT,
    Block,
    blocks,
    compare,
    is_like,
    page,
    run_python,
    run_shell,
    sections,
    texts,
)
from running import call, write
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, mse_loss

from mechanic.torch import mechanize, tuner

RECIPES = [name for name in sections("docs/recipes.md") if name not in ("", "Trainers")]
QUICKSTART = blocks(page("docs/quickstart.md"))

SLOW = ("GANs", "JAX", "Mixed precision", "Reinforcement learning")  # the others take a second
SWEEP = (1e-4, 1e-2, 1e-1)


@pytest.fixture(autouse=True)
def in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None, compiled_steps: None
) -> None:
    """In a folder of its own, with the compiled steps that a reader has."""
    monkeypatch.chdir(tmp_path)


# --------------------------------------------------------------------------- the README


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)


def digits_loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = digits()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(labels), (200, 64), generator=generator)
    return [(images[one], labels[one]) for one in chosen]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def digits_loss(model: torch.nn.Module) -> float:
    images, labels = digits()
    with torch.no_grad():
        return cross_entropy(model(images), labels).item()


def excess(loss: float, sweep: list[float], start: float) -> float:
    """What a run misses of what the best of a sweep has gained; some of the sweep fail."""
    best = min(sweep)
    assert max(sweep) > best + 0.2 * (start - best)
    return (loss - best) / (start - best)


def readme(heading: str) -> Block:
    (found,) = [b for b in blocks(sections("README.md")[heading]) if b.language == "python"]
    return found


# The README shows the lines that are Mechanic's; its reader has a loop already.
LOOP = """
from torch.nn.functional import cross_entropy
for inputs, targets in loader:
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
"""
JAX_LOOP = """
import jax

@jax.jit
def step(params, state, batch):
    updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state

state = tx.init(params)
for batch in batches:
    params, state = step(params, state, batch)
"""


def followed_by(loop: str, block: Block) -> Block:
    return block._replace(code=block.code + loop)


def test_the_example_for_pytorch_is_as_good_as_a_sweep():
    block = followed_by(LOOP, readme("In PyTorch"))
    losses = []
    for lr in SWEEP:
        plain = block.code.replace("mechanize(", "(").replace("lr=1.0", f"lr={lr}")
        assert plain.count(f"lr={lr}") == 1
        names: dict[str, Any] = {"model": network(), "loader": digits_loader()}
        exec(plain, names)
        assert type(names["optimizer"]) is torch.optim.AdamW
        losses.append(digits_loss(names["model"]))
    names = {"model": network(), "loader": digits_loader()}
    run_python(block, names)
    assert excess(digits_loss(names["model"]), losses, digits_loss(network())) < 0.02

    run_python(readme("Look inside"), names)
    assert names["handle"]._optimizer is names["plain"] is names["optimizer"]
    assert type(names["plain"]) is torch.optim.AdamW


@pytest.mark.nightly
def test_the_example_for_jax_is_as_good_as_a_sweep():
    block = followed_by(JAX_LOOP, readme("In JAX"))
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = jax.random.normal(keys[0], (512, 16))
    targets = jnp.tanh(inputs @ jax.random.normal(keys[1], (16, 4)) / 4)
    params = [jax.random.normal(keys[2], (16, 32)) / 4, jax.random.normal(keys[3], (32, 4)) / 6]

    def loss(params, batch):
        x, y = batch
        return jnp.mean((jax.nn.relu(x @ params[0]) @ params[1] - y) ** 2)

    chosen = jax.random.randint(jax.random.key(1), (200, 64), 0, 512)
    batches = [(inputs[one], targets[one]) for one in chosen]

    def trained(code: str) -> float:
        names = {"params": params, "batches": batches, "loss": loss}
        exec(code, names)
        return float(loss(names["params"], (inputs, targets)))

    tuned, plain = (
        "mechanize(optax.adamw(schedule), learning_rate=schedule)",
        "optax.adamw(schedule)",
    )
    assert block.code.count(tuned) == block.code.count("schedule(1.0") == 1
    code = block.code.replace(tuned, plain)
    sweep = [trained(code.replace("schedule(1.0", f"schedule({lr}")) for lr in SWEEP]
    assert excess(trained(block.code), sweep, float(loss(params, (inputs, targets)))) < 0.02


def test_migration_is_the_line_that_it_says():
    text = sections("README.md")["Coming from another method"]
    for new, old in (
        ("from mechanic.torch import mechanize", "from mechanic_pytorch import mechanize"),
        ("mechanic.optax.mechanize(tx)", "optax.contrib.mechanize(tx)"),
    ):
        assert f"`{new}` in place of" in text.replace("\n  ", " ")
        assert old in text
    weights = torch.nn.Parameter(torch.ones(3))
    theirs = mechanic_pytorch.mechanize(torch.optim.SGD)([weights], lr=1.0)
    ours = mechanize(torch.optim.SGD)([weights], lr=1.0)
    assert isinstance(theirs, torch.optim.SGD)
    assert isinstance(ours, torch.optim.SGD)


def table(text: str, first: str) -> dict[str, dict[str, str]]:
    """The table of a page whose head begins with a word, by its first column."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def test_the_results_of_the_readme_are_what_their_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report.py", "--readme"])
    report.main()
    printed = table(capsys.readouterr().out.replace("\u00a0", " "), "task")
    assert len(printed) == 6
    assert table(sections("README.md")["How good is it?"], "task") == printed


def test_the_report_is_what_its_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report.py"])
    report.main()
    assert capsys.readouterr().out == page("benchmarks/results/report.md")


# --------------------------------------------------------------------------- other pages


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bf16 on an old CPU
@pytest.mark.parametrize(
    "heading",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ())
        for name in RECIPES
        if name != "Many processes"
    ],
)
def test_recipe(heading: str):
    texts, names = sections("docs/recipes.md"), dict[str, Any]()
    (setup,) = blocks(texts[""])
    run_python(setup, names)
    model, inputs, targets = names["model"], names["inputs"], names["targets"]
    before = mse_loss(model(inputs), targets).item()
    for block in blocks(texts[heading]):
        run_python(block, names)
        check_recipe(heading, names, before)


def check_recipe(heading: str, names: dict[str, Any], before: float) -> None:
    """What a recipe has trained is good, and a tuner has done it."""
    if heading == "JAX":
        return  # it prints how far the loss fell
    optimizers = [one for one in names.values() if isinstance(one, torch.optim.Optimizer)]
    assert all(tuner(one).scale.min() > 0 for one in optimizers)
    if heading == "GANs":
        drawn = names["generator"](torch.randn(500, 8))
        assert (drawn.mean(dim=0) - 2).abs().max() < 0.7
        assert len(optimizers) == 2
    elif heading != "Reinforcement learning":
        after = mse_loss(names["model"](names["inputs"]).float(), names["targets"]).item()
        assert after < before / 8


@pytest.mark.nightly
def test_the_recipe_for_many_processes(tmp_path: Path):
    texts = sections("docs/recipes.md")
    script, command = blocks(texts["Many processes"])
    (tmp_path / script.title).write_text(blocks(texts[""])[0].code + script.code, "utf-8")
    agreed = "rank ...: the ranks agree: True"
    run_shell(command._replace(printed=f"{agreed}...{agreed}..."), tmp_path)


@pytest.mark.nightly
def test_the_scripts_of_the_quick_start(tmp_path: Path):
    script, *commands = [b for b in QUICKSTART if b.title or (b.language == "sh" and b.printed)]
    (tmp_path / script.title).write_text(script.code, "utf-8")
    assert [shlex.split(block.code)[0] for block in commands] == ["python", "mechanic"]
    for block in commands:
        run_shell(block, tmp_path)


@pytest.mark.nightly
def test_the_lines_of_the_quick_start():
    names: dict[str, Any] = {}
    for block in QUICKSTART:
        if block.language == "python" and not block.title:
            run_python(block, names)
    loss = cross_entropy(names["model"](names["points"]), names["arms"]).item()
    assert loss < 0.02  # the sweep that the page gives has 0.009 at its best


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_the_quick_start_where_rounding_differs(seed: int, tmp_path: Path):
    """What it promises of other machines: first weights that differ in their last digits, from
    which the learned rates part as they do there."""
    edited, look = [b for b in QUICKSTART if b.language == "python" and not b.title][:2]
    names: dict[str, Any] = {}
    run_python(nudged(edited, seed), names)
    run_python(look, names)
    script, summary = (b for b in QUICKSTART if b.title or b.code.startswith("mechanic run"))
    (tmp_path / script.title).write_text(nudged(script, seed).code, "utf-8")
    if seed < 2:  # a process takes longer
        run_shell(summary, tmp_path)


def nudged(block: Block, seed: int) -> Block:
    nudge = f"""
nudges = torch.Generator().manual_seed({seed})
for weights in model.parameters():
    weights.data *= 1 + 1e-6 * torch.randn(weights.shape, generator=nudges)

steps ="""
    assert block.code.count("\nsteps =") == 1
    return block._replace(code=block.code.replace("\nsteps =", nudge))


@pytest.mark.nightly
def test_the_sweep_of_the_quick_start():
    text = " ".join(page("docs/quickstart.md").split())
    found = re.search(r"A sweep of the plain script has (.+?) at ([\d.e, -]+ and [\d.]+)\. ", text)
    assert found is not None
    losses, lrs = (re.split(", | and ", part) for part in found.groups())
    script = QUICKSTART[1]
    assert (script.title, script.code.count("lr=1e-5")) == ("train.py", 1)
    for loss, lr in zip(losses, lrs, strict=True):
        code = script.code.replace("lr=1e-5", f"lr={lr}")
        run_python(script._replace(code=code, printed=f"loss {loss}"), {})


def test_the_edited_script_of_the_quick_start_is_the_first_one():
    first, second = [b.code for b in QUICKSTART if b.language == "python"][:2]
    lines = [line for line in first.splitlines() if line and "AdamW" not in line]
    assert set(lines) <= set(second.splitlines())


@pytest.mark.nightly
def test_the_summary_of_a_run(tmp_path: Path):
    """That of docs/run.md, and the part of it that is in the README."""
    shutil.copy(ROOT / "examples" / "unmodified" / "plain_loop.py", tmp_path)
    said, part = (
        next(text for text in texts(page(name)) if "AdamW: tuned" in text)
        for name in ("docs/run.md", "README.md")
    )
    assert is_like(f"...{part}", said)
    run_shell(Block("sh", "", "mechanic run plain_loop.py > /dev/null", said), tmp_path)


TROUBLED = """
model, other, stranger = make_model(), make_model(), make_model()
healthy = torch.optim.AdamW(model.parameters())
spiked = torch.optim.SGD(other.parameters(), lr=0.1)
forgotten = torch.optim.SGD(stranger.parameters(), lr=0.1)
shuffled = torch.Generator().manual_seed(0)
for step in range(400):
    chosen = torch.randint(64, (16,), generator=shuffled)
    for own, optimizer in ((model, healthy), (other, spiked)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(own(inputs[chosen]), targets[chosen])
        (1e6 * loss if own is other and step == 200 else loss).backward()
        optimizer.step()
    forgotten.step()
"""


@pytest.mark.nightly
def test_what_the_doctor_says(tmp_path: Path):
    (block,) = [b for b in blocks(page("docs/run.md")) if b.printed]
    command = shlex.split(block.code, comments=True)
    assert command == ["mechanic", "doctor", "runs/a"]
    write(tmp_path, TROUBLED)
    (tmp_path / "runs").mkdir()
    run = call(tmp_path, "--quiet", "--log", command[-1], "train.py", MECHANIC_NATIVE="1")
    assert run.returncode == 0, run.stderr
    compare(block, call(tmp_path, "-m", *command, python=True).stdout)


def test_questions():
    answers = [found for text in sections("docs/faq.md").values() if (found := blocks(text))]
    assert len(answers) > 4
    for answer in answers:
        names: dict[str, Any] = {}
        setup_of_questions(names)
        for block in answer:
            assert block.language == "python", block.code
            run_python(block, names)


def setup_of_questions(names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))
    inputs = torch.randn(64, 4)
    for _ in range(30):
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    names.update(torch=torch, model=model, optimizer=optimizer, mechanize=mechanize, tuner=tuner)
