"""Parameters over eight simulated devices: the state is sharded as they are, the scale is the same,
and the compiled step holds one small all-reduce."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

DEVICES = 8
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mechanic.optax import mechanize, scale

sizes, kind, dtype = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
names = ("data", "model")[: len(sizes)]
mesh = jax.make_mesh(sizes, names, axis_types=(getattr(AxisType, kind),) * len(sizes))
if kind == "Explicit":
    jax.set_mesh(mesh)
last = names[-1]
specs = {"a": P("data", None), "b": P(None, last), "c": P(last), "d": P()}
if len(sizes) == 2:
    specs["a"] = P("data", "model")
shapes = {"a": (64, 32), "b": (32, 64), "c": (64,), "d": (3,)}
draw = np.random.default_rng(0)
arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
noise = {name: draw.normal(size=(40, *shape)).astype(np.float32) for name, shape in shapes.items()}

def put(name):
    return jax.device_put(arrays[name], NamedSharding(mesh, specs[name])).astype(dtype)

params = {name: put(name) for name in shapes}
tx = mechanize(optax.adamw(1.0))
state = tx.init(params)

def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

def gradients(t):
    return {
        name: jax.device_put(
            (np.asarray(params[name], np.float32) - 2 + noise[name][t]).astype(dtype),
            NamedSharding(mesh, specs[name]),
        )
        for name in shapes
    }

compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, gradients(0)).compile()
scales = []
for t in range(40):
    params, state = compiled(params, state, gradients(t))
    scales.append(float(scale(state)))

def held(array):
    return [array.sharding.shard_shape(array.shape), str(array.dtype)]

print(json.dumps({
    "scales": scales,
    "hlo": compiled.as_text(),
    "params": {name: held(params[name]) for name in shapes},
    "displacement": {name: held(state.displacement[name]) for name in shapes},
    "numbers": sorted({str(a.dtype) for a in jax.tree.leaves(state.numbers)}),
    "memory": compiled.memory_analysis().temp_size_in_bytes,
}))
"""


def run(sizes, kind="Auto", dtype="float32"):
    flags = f"--xla_force_host_platform_device_count={np.prod(sizes)}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(sizes), kind, dtype],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def collectives(hlo):
    """The collective operations of each computation, and the number of elements of each."""
    found, computation = {}, ""
    for line in hlo.splitlines():
        if line and not line.startswith(" "):
            computation = line.split("(")[0].strip()
        if match := COLLECTIVE.search(line):
            sizes = re.findall(r"\w+\[([\d,]*)\]", line[: match.start()])
            count = sum(int(np.prod([int(n) for n in s.split(",") if n])) for s in sizes)
            found.setdefault(computation, []).append((match.group(1), count))
    return found


def assert_one_small_all_reduce(hlo, along=1):
    """One in the step (along each axis of the mesh), and one in the branch that is taken in the
    first ten steps, when the norm of the update is measured."""
    found = collectives(hlo)
    assert len(found) == 2
    (entry,) = [own for name, own in found.items() if name.startswith("ENTRY")]
    (branch,) = [own for name, own in found.items() if not name.startswith("ENTRY")]
    for own in (entry, branch):
        assert [kind for kind, _ in own] == ["all-reduce"] * along
        assert all(count <= 4 * 3 for _, count in own)  # four arrays, three sums of each


@pytest.mark.nightly
def test_a_mesh_that_is_made_by_default():
    """Its axes are explicit, and no context names it."""
    script = """
import jax, jax.numpy as jnp, optax
from jax.sharding import NamedSharding, PartitionSpec as P
from mechanic.optax import mechanize, scale

mesh = jax.make_mesh((8,), ("data",))
x = jax.device_put(jnp.ones((64, 4)), NamedSharding(mesh, P("data")))
tx = mechanize(optax.adamw(1.0))
jax.jit(tx.init)(x)
state, update = tx.init(x), jax.jit(tx.update)
for _ in range(30):
    updates, state = update(x - 3, state, x)
    x = x + updates
assert state.displacement.sharding == x.sharding, state.displacement.sharding
assert abs(x - 3).max() < 1 and float(scale(state)) > 0.01
"""
    own = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_eight_devices():
    one, eight = run([1]), run([DEVICES])
    assert_one_small_all_reduce(eight["hlo"])
    assert not collectives(one["hlo"])
    np.testing.assert_allclose(eight["scales"], one["scales"], rtol=1e-4)
    assert max(one["scales"]) > 100 * one["scales"][0]
    assert eight["displacement"] == eight["params"]
    assert eight["params"]["a"] == [[64 // DEVICES, 32], "float32"]
    assert eight["numbers"] == ["float32"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "kind", "dtype"),
    [
        ([4, 2], "Auto", "float32"),
        ([DEVICES], "Explicit", "float32"),
        ([2, 4], "Explicit", "bfloat16"),
    ],
    ids=["two axes", "explicit", "explicit, two axes, bf16"],
)
def test_other_meshes(sizes, kind, dtype):
    one, many = run([1], dtype=dtype), run(sizes, kind, dtype)
    assert_one_small_all_reduce(many["hlo"], along=len(sizes))
    np.testing.assert_allclose(
        many["scales"], one["scales"], rtol=1e-4 if dtype == "float32" else 0.05
    )
    shards = {name: shape for name, (shape, _) in many["params"].items()}
    assert shards == {name: shape for name, (shape, _) in many["displacement"].items()}
    assert {kind for _, kind in many["displacement"].values()} == {"float32"}
    assert {own for _, own in many["params"].values()} == {dtype}
