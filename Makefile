# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint types slow fuzz bench docs clean

demo: $(INSTALLED)
	$(BIN)/wideflat demo

test: lint types
	$(BIN)/pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

slow: $(INSTALLED)
	$(BIN)/pytest -m slow

# Another seed every time, printed; make fuzz SEED=7 repeats one.
fuzz: SEED := $(shell $(PYTHON) -c 'import random; print(random.randrange(10**6))')
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/test_arguments.py 5000 $(SEED)
	$(BIN)/python tests/fuzz/test_command_lines.py 500 $(SEED)

# The site: docs/ and the docstrings, searchable, offline, in build/docs.
docs: $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "the site is build/docs/index.html"

bench: $(INSTALLED)
	@for file in benchmarks/[a-z]*.py; do \
		case $$file in benchmarks/machine.py) continue;; esac; \
		echo "== $$file"; $(BIN)/python $$file || exit 1; \
	done

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
