# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
# `make tidy CLANG_TIDY=clang-tidy-18` takes another one.
CLANG_TIDY ?= $(BIN)/clang-tidy
CLANG_TIDY_VERSION := 23.1.4
CPP := $(shell find src/lockstep/csrc tests/csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc')

.DEFAULT_GOAL := help
.PHONY: help install demo test soak check docs drawings pictures format tidy bench wheels core sanitize clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 18

# torch first and by itself: a range would fetch the newest build, whatever its size.
$(BIN)/lockstep: pyproject.toml pytest-lockstep/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) and lockstep into $(VENV) (a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "setuptools>=77" ninja
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable ./pytest-lockstep
	@touch $@

# The C++ sources change more often than the environment. Without the backend Gloo is used.
$(VENV)/binding: $(BIN)/lockstep $(shell find src/lockstep/csrc -type f)
	@test "$$LOCKSTEP_BUILD" = python || $(BIN)/lockstep build || true
	@touch $@

install: $(VENV)/binding ## install lockstep into .venv

demo: install ## train on real handwritten digits with two processes
	@$(BIN)/lockstep train digits -n 2

# Hundreds of interpreters start: without cached bytecode each compiles the package again. Files
# share the cores, so a thread that waits must not spin: that took a sixth of the processor time.
test: install ## run the whole test suite, JOBS=3 files at a time
	@PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

soak: install ## run the long tests: races, sanitizers, random trainings (about 30 minutes on two cores)
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m "hypothesis and not stress" --hypothesis-profile=soak -n 2 --dist loadfile
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m stress -n 2 --dist loadfile

docs: install ## build the documentation into site/; a broken link is an error
	@$(BIN)/zensical build --strict --clean

drawings: install ## draw docs/pictures/*.svg from schedules, trees and examples
	@$(BIN)/python -m dev.drawings

pictures: install ## make the pictures of the documentation from real runs; needs Chromium
	@$(BIN)/python dev/pictures.py

check: install docs ## format, lint, types, documentation
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	@git ls-files -z | xargs -0 $(BIN)/python dev/check_files.py
	@$(BIN)/mypy
	@$(BIN)/python dev/house.py --check
	@$(BIN)/python dev/step_calls.py --check
	@$(BIN)/basedpyright --project pyproject.toml --pythonpath $(BIN)/python --warnings

format: install ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/clang-format -i $(CPP)

# The core and its tests. The binding is left out: each of its files reads all headers of torch.
tidy: ## run clang-tidy on the C++ core and its tests
	@command -v $(CLANG_TIDY) >/dev/null || { \
		echo "make tidy: there is no $(CLANG_TIDY): pip install clang-tidy==$(CLANG_TIDY_VERSION), or set CLANG_TIDY" >&2; \
		exit 1; }
	@$(CLANG_TIDY) --quiet $(filter-out %_avx2.cpp %_avx512.cpp,$(filter src/lockstep/csrc/core/%.cpp tests/csrc/%.cpp,$(CPP))) -- \
		-std=c++20 -Isrc/lockstep/csrc/core -Itests/csrc

bench: install ## compare two replicas with one process; writes benchmarks/replicas.md
	@$(BIN)/python benchmarks/replicas.py

# TORCH has a default, for `make install`; only if it is given does it choose from the matrix.
wheels: ## build wheels, for all PYTHONS=3.11,... and all TORCH=2.13.0,... of the matrix
	@$(PYTHON) dev/wheels.py --python "$(PYTHONS)" --torch "$(if $(filter file,$(origin TORCH)),,$(TORCH))"

core: ## run the native core's own tests
	@$(MAKE) -C tests/csrc test

sanitize: ## run them under ThreadSanitizer and AddressSanitizer
	@$(MAKE) -C tests/csrc sanitize

clean: ## remove what was built
	@rm -rf $(VENV) build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info pytest-lockstep/src/*.egg-info
