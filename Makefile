# Every target makes the virtual environment it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN ?= runs/readme
# Ranks, test workers and BLAS threads share the same cores.
JOBS ?= 2

.PHONY: train test test-all lint format types install clean

install: $(READY)

# torch first: fairscale's build reads it. Without build isolation nothing fetches a second torch.
$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): once, and torch is large, so this takes minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy hatchling editables wheel "setuptools<81"
	@$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[train,hf,fairscale,tensorboard,report,test,lint]"
	@touch $(READY)

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 launch/train.py \
		--precision fp16 --growth-interval 25 --run-dir $(RUN) --overwrite

test: $(READY)
	@$(BIN)/python -m tests.simulated.build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test-all: $(READY)
	@$(BIN)/python -m tests.simulated.build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m ""

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
