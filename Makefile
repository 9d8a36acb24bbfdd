# make install everything into .venv, once
# make demo    train a tiny model by reinforcement, whole chain, on this machine
# make test    all but the longest  make lint    style, types, import direction, names and sizes
# make house   measure packages, names, sizes and sentences, and compare them with what is allowed
# make e2e     train whole runs: by command, by agents, from the wheel (half an hour)
# make faults  break everything that can break, and print a table (an hour or more)
# make backends  train whole runs on SkyRL without a card, on one process and on two hosts (half an hour; installs 8 GB once)
# make sdk-matrix  run trainer and engine against the oldest, the pinned and the newest Tinker SDK (a quarter of an hour)
# make serve   Prefect server and runner, until Ctrl-C
# make rehearsal  serve a rehearsal of the Tinker cloud: real names and prices, tiny models, no key
# make bench   measure; prints tables of ratios
# make families  compare the engine with transformers and PEFT on twelve families of models (a minute); writes docs/reference/families.md
# make docs    write the pages that are made from the code, and build the site into site/
# make tiny-model  train the model that comes with the package anew (half a minute)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH := torch==2.13.0
# Where PyTorch publishes builds without CUDA for Linux; used when there is no NVIDIA GPU.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Tests start hundreds of processes; without cached bytecode each would compile this project anew.
export PYTHONDONTWRITEBYTECODE :=

LONGEST_FAULTS := $(addprefix tests/faults/test_,final_states.py services.py hands.py orchestration.py server_starts.py \
    logs.py hosts.py advised_commands.py)

# uv installs in less than half of pip's time, and compiles everything at once; pip also knows
# package indexes of its own configuration.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint constraints.txt
PIP := $(BIN)/pip install -qq --constraint constraints.txt

.PHONY: install demo test e2e coverage faults backends sdk-matrix serve rehearsal lint house bench families docs tiny-model clean

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/lachesis demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder

e2e: $(INSTALLED)
	$(BIN)/python -m pytest -m 'long and not matrix and not backends' --numprocesses 3 --dist loadscope --no-loadscope-reorder

coverage: $(INSTALLED)
	rm -rf .coverage_parts && mkdir .coverage_parts
	PYTHONPATH=$(CURDIR)/tests/repository/coverage:$(CURDIR) $(BIN)/python -m pytest -m 'not matrix and not backends' --numprocesses 3 --dist loadscope --no-loadscope-reorder
	$(BIN)/python tests/repository/coverage/floors.py

faults: $(INSTALLED)
	$(BIN)/python -m pytest $(LONGEST_FAULTS) $(wildcard tests/faults/test_*.py) tests/tinker_cloud tests/e2e -m 'matrix or pages' \
	    --numprocesses 3 --dist loadscope --no-loadscope-reorder

backends: $(INSTALLED)
	$(BIN)/python -m pytest -m backends tests/backends -s

sdk-matrix: $(INSTALLED)
	$(BIN)/python -m tests.clients.sdk_matrix

serve: $(INSTALLED)
	$(BIN)/lachesis serve

rehearsal: $(INSTALLED)
	$(BIN)/python -m tests.tinker_cloud

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python bench/code_style.py

house:
	$(PYTHON) bench/code_style.py

bench: $(INSTALLED)
	$(BIN)/python bench/engine_speed.py
	$(BIN)/python bench/time_to_reward.py
	$(BIN)/python bench/launch_time.py
	$(BIN)/python bench/launch_walk.py
	$(BIN)/python bench/rollout_storage.py
	$(BIN)/python bench/first_minutes.py --wheel
	$(BIN)/python bench/tool_latency.py
	$(BIN)/python bench/inference_test_time.py
	$(BIN)/python bench/monitor_tick.py
	$(BIN)/python bench/learning_judgement.py
	$(BIN)/python bench/trainer_pauses.py
	$(BIN)/python bench/environment_cost.py
	$(BIN)/python bench/demo_learning.py

families: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python bench/model_families.py --write docs/reference/families.md

docs: $(INSTALLED)
	$(BIN)/python -m docs_generator
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

tiny-model: $(INSTALLED)
	$(BIN)/python -m lachesis.tiny_model

clean:
	rm -rf $(VENV) .coverage_parts .pytest_cache .ruff_cache .mypy_cache site

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Python 3.11 or newer is needed, this is %d.%d; say make PYTHON=python3.12" % v[:2])'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing about 170 packages, once (a few minutes, about 2 GB with PyTorch for the CPU)"
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then \
	    $(BIN)/pip install -qq --no-deps --no-compile "$(TORCH)+cpu" 2>/dev/null \
	    || $(BIN)/pip install -qq --no-deps --no-compile --index-url "$(TORCH_CPU_INDEX)" "$(TORCH)" \
	    || echo "no CPU-only PyTorch found; the general build follows, which is larger"; \
	fi
	@$(BIN)/pip uninstall -qq --yes lachesis  # its name before 0.2
	@$(PIP) uv || echo "uv cannot be installed; pip is slower"
	@$(UV) --editable '.[embedded,dev]' 2>/dev/null || $(PIP) --editable '.[embedded,dev]'
	@$(UV) --no-deps tinker-cookbook 2>/dev/null || $(PIP) --no-deps tinker-cookbook  # tests need few of its own packages
	@touch $@
