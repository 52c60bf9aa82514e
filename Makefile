# The two main commands are `make demo` and `make test`. Both first install what they need.
PATH := $(CURDIR)/.venv/bin:$(PATH)
export PATH

.PHONY: help setup demo soak test lint tests unit histories images integration test-slow test-trixie mutants docs clean

help:
	@echo "make demo       build the image, start the lab, run real jobs in VMs, then stop all of it"
	@echo "make soak       jobs of all kinds for two hours while every component is killed: MINUTES=120, SEED=1 (root)"
	@echo "make test       lint, types, unit, contract, simulation, integration on the real lab (root)"
	@echo "make unit, make histories, make integration: parts of it"
	@echo "make test-slow  the slow tests and test-trixie: three hours or more"
	@echo "make test-trixie the integration tests on Debian 13, with its Slurm 24.11 and QEMU 10, in a root file system of its own"
	@echo "make mutants    mutation tests of the core: do the unit tests notice changed decisions? an hour or more"
	@echo "make setup      install packages and the Python environment only, for development; not on a site's machine"
	@echo "make docs       draw the state diagrams from the tables, and generate docs/options.md from its tests"

setup:
	@scripts/setup

demo: setup
	@multiverse demo

soak: setup
	@nice -n 10 multiverse soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

# The histories need two cores for minutes. Beside the other tests, with the lowest priority, they use what these leave.
test: lint
	@$(MAKE) --no-print-directory -j2 tests histories

tests:
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory integration

lint: setup
	ruff check src tests
	ruff format --check src tests
	mypy
	lint-imports --no-logo

unit: setup
	pytest -n auto tests/unit tests/contract tests/simulation -m "not integration and not slow and not histories"

histories: setup
	@mkdir -p var
	@echo "histories: 2,000 of them are simulated beside the other tests"
	@nice -n 19 pytest tests/simulation -m histories > var/histories.log 2>&1 || { cat var/histories.log; exit 1; }
	@echo "histories: $$(tail -n 1 var/histories.log)"

images: setup
	python -m tests.integration.images

integration: setup
	pytest tests/contract tests/integration -m "integration and not slow"

test-slow: setup
	pytest tests -m slow
	$(MAKE) test-trixie

test-trixie:
	scripts/in-debian trixie make setup images
	scripts/in-debian --alone trixie make integration

mutants: setup
	nice -n 19 mutmut run --max-children 1
	mutmut results

docs: setup
	python scripts/lifecycle
	python scripts/options

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis var mutants
