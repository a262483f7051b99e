# Every target makes the virtual environment that it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# make train needs a part of the developer's environment.
TRAIN_READY := $(VENV)/.ready-to-train
RUN ?= runs/readme
# Two workers keep two cores busy. Each further one imports torch and collects the tests once more.
JOBS ?= 2

# The trainers' own packages, beside those of the other tests.
TRAINERS := .venv-trainers
TRAINERS_READY := $(TRAINERS)/.ready

.PHONY: train test test-all test-programs test-trainers long-runs lint format docs docs-check package install clean

install: $(READY)

# torch comes first, because the build of fairscale imports it. Without build isolation that build
# uses this torch, and does not download a second one.
$(READY): pyproject.toml constraints.txt
	@echo "Installing the developer's environment into $(VENV). It takes minutes, because torch is large."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy hatchling editables wheel "setuptools<81"
	@$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[train,hf,trainers,fp8,spmd,fairscale,tensorboard,report,test,lint,docs]"
	@touch $(READY) $(TRAIN_READY)

$(TRAIN_READY): pyproject.toml constraints.txt
	@echo "Installing torch and the packages of the launcher into $(VENV). It takes minutes, because torch is large."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -c constraints.txt -e ".[train]"
	@touch $(TRAIN_READY)

train: $(TRAIN_READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		launch/train.py --precision fp16 --growth-interval 10 --log-every 10 --eval-every 20 \
		--max-time 90s --overwrite --run-dir $(RUN)

# The tests run without these programs, but skip what needs them.
test-programs: $(READY)
	@command -v spin > /dev/null || echo "SPIN is not installed (apt-get install spin). The tests compare the ranks with stored runs of the protocol's models, and do not check the models."
	@command -v $${CXX:-c++} > /dev/null || echo "There is no C++ compiler. The tests on a simulated accelerator are skipped."
	@$(BIN)/python -m tests.simulated.build

# Without stored bytecode, each worker compiles the tests and the package again.
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test: test-programs
	$(PYTEST)

test-all: test-programs
	$(PYTEST) -m ""

# Hours on two cores; docs/results/long_runs.md gets a dated row from each program.
long-runs: test-programs
	$(BIN)/python -m tests.long_runs

# Their dependencies are named in the file: some would bring a second torch.
$(TRAINERS_READY): $(READY) tests/trainers/requirements.txt
	@echo "Installing trainers into $(TRAINERS): about 1 GB, once"
	@$(PYTHON) -m venv $(TRAINERS)
	@$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> $$($(TRAINERS)/bin/python -c "import site; print(site.getsitepackages()[0])")/shared.pth
	@$(TRAINERS)/bin/python -m pip install --quiet --no-deps -r tests/trainers/requirements.txt
	@touch $(TRAINERS_READY)

test-trainers: $(TRAINERS_READY)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(TRAINERS)/bin/python -m pytest tests/trainers \
		-n $(JOBS) --dist loadgroup -m ""

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: docs-check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000

# A link that leads nowhere, a name that mkdocstrings does not find: any warning is an error.
docs-check: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

package: $(READY)
	@$(BIN)/python -m pip install --quiet -c constraints.txt build twine check-wheel-contents
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.installed dist/*.whl dist/*.tar.gz

clean:
	rm -rf $(VENV) $(TRAINERS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
