# The two commands: `make demo` runs the main job, `make test` every check. Each makes .venv itself.

PYTHON ?= python3
TORCH := torch==2.13.0
# The oldest torch that pyproject.toml allows, and the torchao of its time.
OLDEST := torch==2.6.0 torchao==0.13.0
BIN := .venv/bin
PYTEST := -m pytest -n auto --dist loadfile

.PHONY: demo bench test test-docs test-all test-oldest check docs figures release-check step-cost soak audit clean

demo: .venv/demo.stamp
	$(BIN)/python examples/digits.py

# The convex suite on what scikit-learn bundles, and its report in mechanic-report/.
bench: .venv/bench.stamp
	$(BIN)/mechanic bench convex
	$(BIN)/mechanic report

test: check
	$(BIN)/python $(PYTEST) --doctest-modules

# The site, built strictly, and what of the docs, examples, notebooks and wheel takes minutes to test.
# Of the examples for `mechanic run` each runs; `make test-all` also compares them with sweeps.
test-docs: docs .venv/dev.stamp
	$(BIN)/python $(PYTEST) -m "nightly" tests/test_release.py tests/test_docs_code.py \
		tests/test_docs_commands.py tests/test_docs_notebooks.py tests/test_docs_site.py \
		tests/test_examples.py tests/test_integrations_docs.py \
		tests/test_run_examples.py::test_runs_unmodified_and_is_tuned

# The tests that take minutes as well, those of all trainers and loggers, and the oldest torch.
test-all: check .venv/integrations.stamp
	$(BIN)/python $(PYTEST) --doctest-modules -m "nightly or not nightly"
	$(MAKE) test-oldest

# The tests of mechanic.torch and mechanic run with the oldest torch. The bench, optax and the
# kernels, which need a newer Triton's interpreter, are left out.
test-oldest: .venv-oldest/stamp
	.venv-oldest/bin/python $(PYTEST) tests --ignore-glob="*/test_bench_*" --ignore-glob="*/test_optax_*" \
		--ignore-glob="*/test_kernel*" --ignore-glob="*/test_docs*" --ignore=tests/test_house.py \
		--ignore=tests/test_quality.py

.venv-oldest/stamp: pyproject.toml Makefile
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(OLDEST)
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[torch,test]"
	touch $@

# Format, lint and types: the same here and in CI.
check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in site/: open site/index.html. A warning, such as a dead link, is an error.
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The figures of the docs, in docs/images, from runs of a minute.
figures: .venv/demo.stamp
	$(BIN)/python docs/figures.py

# Wheel and sdist, in dist/, and the wheel in a clean environment for each extra for users but timm.
release-check: .venv/dev.stamp
	$(BIN)/python tests/release.py "$(TORCH)"

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
	rm -rf .venv .venv-oldest
