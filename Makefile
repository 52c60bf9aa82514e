# The two main commands are `make demo` and `make test`. Both first install what they need.
PATH := $(CURDIR)/.venv/bin:$(PATH)
export PATH

.PHONY: spank help setup demo demo-preempt soak test lint unit beside unit-beside isolated on-lab images integration test-slow test-trixie mutants packages packages-check docs docs-site clean

help:
	@echo "make demo       build the image, start the lab, run real jobs in VMs, then stop all of it"
	@echo "make demo-preempt  another story: urgent jobs take the places of others, which move or are saved, and go on"
	@echo "make soak       jobs of all kinds for two hours while every component is killed: MINUTES=120, SEED=1 (root)"
	@echo "make test       lint, types, unit, contract, simulation, integration on the real lab (root)"
	@echo "make spank      Slurm's plugin for VMs inside jobs, into var/spank"
	@echo "make unit, make integration: parts of it"
	@echo "make test-slow  the slow tests by groups, test-trixie and mutants: many hours; scripts/slow GROUP... runs some of them"
	@echo "make test-trixie the integration tests on Debian 13, with its Slurm 24.11 and QEMU 10, in a root file system of its own"
	@echo "make mutants    mutation tests of the core: do the unit tests notice changed decisions? an hour or more"
	@echo "make setup      install packages and the Python environment only, for development; not on a site's machine"
	@echo "make packages   Debian packages for 12 and 13, RPMs and wheels, into dist/ (root); packages-check also compares two builds"
	@echo "make docs       generate the state diagrams, docs/options.md, docs/settings.md, docs/api.*, the manual pages and the shells' completion"
	@echo "make docs-site  the documentation as a site with search, and each page as plain text, in var/site: open var/site/index.html"

setup:
	@scripts/setup

demo: spank
	@multiverse demo

demo-preempt: spank
	@multiverse demo --preempt

soak: setup
	@nice -n 10 multiverse soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

# The tests on the lab mostly wait for guests. The others run beside them, one after the other: if they took both of make's
# slots, the tests on the lab would begin only after the first of them.
test: setup
	@$(MAKE) --no-print-directory -j2 lint images
	@$(MAKE) --no-print-directory -j2 on-lab beside

beside:
	@MAKEFLAGS= $(MAKE) --no-print-directory --keep-going unit-beside isolated

# Runs the command $(2) and prints its output if it fails, else the last line.
define quietly
	@mkdir -p var
	@$(2) > var/$(1).log 2>&1 || { cat var/$(1).log; exit 1; }
	@echo "$(1): $$(tail -n 1 var/$(1).log)"
endef

lint: setup
	ruff check src tests
	ruff format --check src tests
	mypy
	lint-imports --no-logo

UNIT := pytest -n auto tests/unit tests/contract tests/simulation -m "not integration and not slow"

unit: setup
	$(UNIT)

unit-beside: setup
	$(call quietly,unit,nice -n 19 $(UNIT))

spank: setup
	@$(MAKE) --no-print-directory -C spank

images: setup
	python -m tests.integration.images

INTEGRATION := pytest tests/contract tests/integration -m "integration and not slow"
# These run beside the others, in a process of their own, and so in other labs. The two take about the same time, and mostly wait. First
# come those that make labs of their own, a simulated site, simulated drivers, or a site in namespaces.
ISOLATED := $(addprefix tests/integration/,$(addsuffix .py,test_web_page test_site test_hosts test_live_moves \
	test_leases test_overflow test_strangers test_job_access test_job_ends test_job_row test_job_vms_mpi test_job_vms_nodes \
	test_job_vms_scenarios test_save_command test_saved_trouble test_sleeping_jobs test_docs_site))

integration: spank
	$(INTEGRATION)

on-lab: spank
	$(INTEGRATION) $(addprefix --ignore=,$(ISOLATED))

isolated: spank
	$(call quietly,isolated,pytest $(ISOLATED) -m "integration and not slow")

test-slow: spank
	scripts/slow

test-trixie:
	scripts/in-debian trixie make setup images
	scripts/in-debian --alone trixie make integration

mutants: setup
	nice -n 19 mutmut run --max-children 1
	mutmut results

packages: setup
	scripts/packages

packages-check: setup
	scripts/packages --check

docs: setup
	python scripts/lifecycle
	python scripts/options
	python scripts/commands
	python scripts/settings

docs-site: setup
	mkdocs build --strict

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis var mutants dist
