# The two commands: `make demo` runs the main job, `make test` every check. Each makes .venv itself.

PYTHON ?= python3
TORCH := torch==2.13.0
BIN := .venv/bin

.PHONY: demo bench test test-all check step-cost soak audit clean

demo: .venv/demo.stamp
	$(BIN)/python examples/digits.py

# The convex suite on what scikit-learn bundles, and its report in mechanic-report/.
bench: .venv/bench.stamp
	$(BIN)/mechanic bench convex
	$(BIN)/mechanic report

test: check
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --doctest-modules

# The tests that take minutes as well.
test-all: check
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --doctest-modules -m "nightly or not nightly"

# Format, lint and types: the same here and in CI.
check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

step-cost: .venv/dev.stamp
	$(BIN)/python benchmarks/step_cost.py

# An hour of training with faults at random.
soak: .venv/dev.stamp
	$(BIN)/python benchmarks/soak.py

# torch goes first, by its exact version, so that nothing else chooses another build of it.
.venv/%.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[torch,$*]"
	touch $@

# Known vulnerabilities of all that is installed. It asks pypi.org.
audit: .venv/dev.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	$(BIN)/pip-audit --skip-editable

clean:
	rm -rf .venv
