# Every target sets up what it needs in .venv; nothing else on the machine is touched.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check bench soak clean

demo: $(READY)
	@scripts/demo

test: $(READY)
	@scripts/test

check: $(READY)
	@scripts/check

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

soak: $(READY)
	$(BIN)/python -m benchmarks.run soak

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,bench,demo,hf]"
	@touch $@
