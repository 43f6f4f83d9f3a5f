# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What `make demo` needs, and what the tests need beyond it: trainers of others, a browser, oracles.
INSTALLED := $(VENV)/.installed
FOR_TESTS := $(VENV)/.installed-dev

.PHONY: demo test lint types slow test-device fuzz soak bench docs clean

demo: $(INSTALLED)
	$(BIN)/wideflat demo

test: lint types
	$(BIN)/pytest -n 2

lint: $(FOR_TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(FOR_TESTS)
	$(BIN)/mypy

slow: $(FOR_TESTS)
	$(BIN)/pytest -m slow

# What needs an accelerator: make test-device DEVICE=cuda (mps, xpu, ...); docs/devices.md says what it covers.
test-device: DEVICE := cuda
test-device: $(INSTALLED)
	WIDEFLAT_TEST_DEVICE=$(DEVICE) $(BIN)/pytest tests/test_device.py

# Another seed every time, printed; make fuzz SEED=7 repeats one.
fuzz: SEED := $(shell $(PYTHON) -c 'import random; print(random.randrange(10**6))')
fuzz: $(FOR_TESTS)
	$(BIN)/python tests/fuzz/test_arguments.py 5000 $(SEED)
	$(BIN)/python tests/fuzz/test_strange.py 5000 $(SEED)
	$(BIN)/python tests/fuzz/test_walks.py 5000 $(SEED)
	$(BIN)/python tests/fuzz/test_command_lines.py 500 $(SEED)

# Training with losses of replicas, for an hour; as root with partitions, in network namespaces of its own.
soak: MINUTES := 60
soak: SEED := 0
soak: $(FOR_TESTS)
	$(BIN)/python tools/soak.py --minutes $(MINUTES) --seed $(SEED)

# The site: docs/ and the docstrings, searchable, offline, in build/docs.
docs: $(FOR_TESTS)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "the site is build/docs/index.html"

bench: $(FOR_TESTS)
	@for file in benchmarks/[a-z]*.py; do \
		case $$file in benchmarks/machine.py) continue;; esac; \
		echo "== $$file"; $(BIN)/python $$file || exit 1; \
	done

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[experiments]'
	touch $(INSTALLED)

$(FOR_TESTS): $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(FOR_TESTS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
