"""C code that is compiled at first use: the rule that it is written from, what is kept, and what
happens where it cannot be."""

import ctypes
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from lockstep import assert_near, same_bits
from nativelock import FIRST, native_steps, on_native
from rule_cases import RULE_OPTIONS, draw_cases
from torch import nn
from torch.optim import AdamW

from mechanic import tuner as rules
from mechanic.advance import advance
from mechanic.options import Options
from mechanic.torch import mechanize
from mechanic.torch.native import build, library, step
from mechanic.torch.native.rule import write_rule
from mechanic.torch.scalars import rows_of
from mechanic.torch.written import GIVEN, STEP_SUMS

pytestmark = on_native

SOURCE = "int answer(void) { return %d; }\n"


def forget() -> None:
    """Forget what this process has loaded."""
    library.find_passes.cache_clear()
    library._load_step.cache_clear()


@pytest.fixture
def anew() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mechanic" / "native"


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def train(used: bool = True, steps: int = FIRST + 5) -> tuple[Any, int]:
    """A run, and how many of its steps were compiled ones."""
    params = [nn.Parameter(torch.linspace(1, 2, 30)), nn.Parameter(torch.ones(3))]
    optimizer = mechanize(AdamW(params, lr=1.0))
    with native_steps(used) as made:
        for _ in range(steps):
            for param in params:
                param.grad = param.detach() - 5
            optimizer.step()
    return optimizer, len(made)


def of_rule(place: int) -> Any:
    name = str(RULE_OPTIONS[place])
    return case(RULE_OPTIONS[place], name=name, by_day=place in (0, 14))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [of_rule(place) for place in range(len(RULE_OPTIONS))])
def test_the_rule_is_the_tuners(options, frozen):
    """With one β it is so bit for bit: what Python computes with floats, in the same order."""
    options = Options(**options)
    rows, n = rows_of(options), len(options.betas)
    packed, measured = draw_cases(options, 40)
    rule = build.load(write_rule(options, frozen=frozen), [library._EXACT]).rule
    rule.argtypes, rule.restype = [ctypes.c_void_p] * 3, None
    written, made = packed.clone(), torch.zeros(len(packed), 4, dtype=torch.float64)
    for place in range(len(packed)):
        rule(*(table[place].data_ptr() for table in (written, measured, made)))
    for had, given, now, own in zip(packed, measured, written, made, strict=True):
        before = dict(zip(rows, had, strict=True))
        numbers = {k: v if k in rules.PER_BETA and n > 1 else v[0] for k, v in before.items()}
        numbers = {k: float(v) if n == 1 else v for k, v in numbers.items()}
        told = dict(zip(GIVEN, given.tolist() if n == 1 else given, strict=True))
        kind, part = rules.state_type(options), told["takes_part"] != 0
        state = kind(*(numbers[name] for name in kind._fields))
        sums = {name: told[name] for name in STEP_SUMS}
        sums |= {"x1": numbers["reference_square"], "d": numbers["size"]}
        state, share, keeps = advance(
            options, state, told["share"], rules.Sums(**sums), part, frozen=frozen
        )
        expected = numbers | state._asdict()
        if part:
            expected["scale"] = rules.scale_of(state)
        for name, value in {**state._asdict(), "scale": expected["scale"], "share": share}.items():
            row = torch.as_tensor(value, dtype=torch.float64).expand(n)
            assert_near(row, now[rows.index(name)], 0.0 if n == 1 else 1e-12, name)
        assert float(own[1]) == pytest.approx(float(share), rel=1e-12)
        assert float(own[3]) == (float(keeps) if part else 1.0)


def test_the_passes_compile_without_a_warning(tmp_path):
    source = tmp_path / "all.c"
    source.write_text(library.read_source(), "utf-8")
    compiler = build.find_compiler()
    assert compiler is not None
    command = [*compiler, *build._ALWAYS, "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "p.so"), "-lm"], check=True)


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_steps_are_the_plain_paths(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    optimizer, made = train()
    assert made == 0
    assert same_bits(optimizer, train(used=False)[0])


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_fails_is_told_of_once(monkeypatch, folder):
    monkeypatch.setenv("CC", "false")
    with pytest.warns(RuntimeWarning, match="C code cannot be compiled.*MECHANIC_NATIVE=0") as told:
        optimizer, made = train()
    assert len(told) == 1
    assert made == 0
    assert same_bits(optimizer, train(used=False)[0])


@pytest.mark.usefixtures("anew")
def test_what_was_compiled_is_kept(folder, monkeypatch):
    optimizer, made = train()
    assert made == 5
    found = kept(folder)
    assert len(found) == 2  # the passes and the rule
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    forget()
    monkeypatch.setattr(build, "_compile", None)  # it is not called again
    again, made = train()
    assert made == 5
    assert kept(folder) == found
    assert same_bits(optimizer, again)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    "why",
    ["no folder", "open to others"]
    + [case(why, name=why, by_day=False) for why in ("someone else's", "a file")],
)
def test_a_folder_that_cannot_be_trusted_or_written_to_is_not_used(
    why, folder, tmp_path, monkeypatch
):
    if why == "no folder":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    elif why == "someone else's":
        folder.mkdir(parents=True)
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
    elif why == "open to others":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    else:
        folder.parent.write_text("no folder")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert train()[1] == 5
    assert not folder.is_dir() or not kept(folder)
    assert not kept(temporary)


def test_a_kept_library_that_is_damaged_is_made_anew(folder, monkeypatch):
    source, key = SOURCE % 7, build._key
    with monkeypatch.context() as patch:
        patch.setattr(build, "_key", lambda *of: key(*of) + "-other")
        assert build.load(source, [["-O1"]]).answer() == 7
    (name,) = kept(folder)
    damaged = folder / name.replace("-other", "")
    damaged.write_bytes((folder / name).read_bytes()[:100])
    assert build.load(source, [["-O1"]]).answer() == 7
    assert len(damaged.read_bytes()) > 1000
    assert len(kept(folder)) == 2


def test_flags_that_a_compiler_does_not_know_are_left_out(folder):
    assert build.load(SOURCE % 3, [["-march=nonsense"], ["-O1"]]).answer() == 3
    with pytest.raises(RuntimeError, match="failed"):
        build.load(SOURCE % 3, [["-march=nonsense"]])
    assert len(kept(folder)) == 1


@pytest.mark.filterwarnings("ignore:.*fork")  # beside the threads of JAX, too
def test_several_processes_compile_the_same_at_once(folder):
    """Each finds a whole library, and one is left."""
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answers = [build.load(SOURCE % n, [["-O1"]]).answer() for n in (1, 2, 3)]
                status = 0 if answers == [1, 2, 3] else 2
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert len(kept(folder)) == 3


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_the_environment_turns_it_off(value, expected):
    environment = {} if value is None else {"MECHANIC_NATIVE": value}
    assert step.is_wanted(environment) is expected
    assert not step.IS_ON  # see conftest.py
