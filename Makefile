# Every target sets up what it needs in .venv; nothing else on the machine is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check bench studies docs soak fuzz swarms clean

demo: $(READY)
	@scripts/demo

test: $(READY)
	@scripts/test

check: $(READY)
	@scripts/check

docs: $(READY)
	@scripts/docs
	@echo "the site is in build/site: open build/site/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks.run plan
	$(BIN)/python -m benchmarks.run noise
	$(BIN)/python -m benchmarks.run stages
	$(BIN)/python -m benchmarks.run capture
	$(BIN)/python -m benchmarks.run families
	$(BIN)/python -m benchmarks.run memory
	$(BIN)/python -m benchmarks.run pipeline
	$(BIN)/python -m benchmarks.run allreduce
	$(BIN)/python -m benchmarks.run convergence
	$(BIN)/python -m benchmarks.run quality
	$(BIN)/python -m benchmarks.run recovery
	$(BIN)/python -m benchmarks.run transfer
	$(BIN)/python -m benchmarks.run finetune
	$(BIN)/python -m benchmarks.run dashboard
	$(BIN)/python -m benchmarks.run stores

studies: $(READY)
	$(BIN)/python -m studies.run all

soak: $(READY)
	$(BIN)/python -m benchmarks.run soak

# Other inputs every day; SEED=N makes those of an earlier day again.
SEED ?= $(shell date +%j)
fuzz: $(READY)
	RAVNEST_FUZZ_SEED=$(SEED) RAVNEST_FUZZ=10000 $(BIN)/python -m pytest -q tests/properties/test_foreign_files.py
	RAVNEST_FUZZ_SEED=$(SEED) RAVNEST_FUZZ=100000 $(BIN)/python -m pytest -q tests/properties/test_hostile_messages.py
	RAVNEST_FUZZ=1 $(BIN)/python -m pytest -q --timeout=3600 tests/system tests/properties/test_hub_laws.py tests/properties/test_check_laws.py
	$(MAKE) swarms

# Laws of simulated swarms: so many seeds of so many home PCs each.
SEEDS ?= 100
NODES ?= 1000
swarms: $(READY)
	RAVNEST_SEEDS=$(SEEDS) RAVNEST_NODES=$(NODES) $(BIN)/python -m pytest -q tests/properties/test_simulation_laws.py

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench,demo,docs,hf,postgres,s3]"
	@touch $@
