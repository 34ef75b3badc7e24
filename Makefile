# make demo, make test: work on a fresh machine that has only Python and make.
#
#   PYTHON=/path/to/python   use this environment as it is: nothing is installed, no .venv is made
#   HOST_PYTHON=python3.12   the Python that .venv is made with

VENV := .venv
EXTRAS := experiments,cuda,test,dev
HF_PACKAGES := accelerate==1.12.0 librosa einops soundfile transformers==4.57.3
HAS_GPU := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg)
PINS := $(if $(HAS_GPU),,-c constraints-ci.txt)

ifdef PYTHON
RUN := $(PYTHON)
READY := check-python
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

.PHONY: help demo test test-interpret test-rest lint hf check-python clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   compare every backend that this machine has"
	@echo "make test   run the tests"
	@echo "make lint   ruff and mypy"
	@echo "make hf     add the official qwen-tts package, which the parity tests compare with"
	@echo "make clean  remove .venv"

demo: $(READY)
	$(RUN) -m experiments.compare

# Two processes: Triton decides when a kernel is defined whether it is interpreted or compiled.
test: test-interpret test-rest

test-interpret: $(READY)
	TRITON_INTERPRET=1 $(RUN) -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

test-rest: $(READY) test-interpret
	env -u TRITON_INTERPRET $(RUN) -m pytest $(if $(HAS_GPU),,-n auto --dist loadfile) $(PYTEST_ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# --no-deps: the package's plain dependencies pull others that do not load together.
hf: $(READY)
	$(RUN) -m pip install --quiet $(PINS) $(HF_PACKAGES)
	$(RUN) -m pip install --quiet --no-deps qwen-tts==0.1.1

check-python:
	@$(RUN) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))" || { \
	  echo "PYTHON=$(PYTHON): not a Python 3.11, 3.12 or 3.13 that starts" >&2; exit 1; }
	@$(RUN) -c "import torch, triton, numpy, safetensors, hydra, rich, matplotlib, pytest, xdist" || { \
	  echo "PYTHON=$(PYTHON): the package above is missing there; nothing was installed." >&2; \
	  echo "Install with: $(PYTHON) -m pip install -e '.[$(EXTRAS)]', or leave PYTHON out." >&2; \
	  exit 1; }

# Without a GPU: first the versions that CI tests (a CPU build of torch where pip has one), else
# whatever pip finds within the package's ranges.
$(VENV)/.installed: pyproject.toml constraints-ci.txt
	@for python in $(or $(HOST_PYTHON),python3 python3.12 python3.11 python3.13); do \
	  if $$python -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))" \
	      2>/dev/null; then \
	    echo "$(VENV): made with $$python"; exec $$python -m venv --clear $(VENV); \
	  fi; \
	done; \
	echo "no Python 3.11, 3.12 or 3.13 found; name one with HOST_PYTHON=..." >&2; exit 1
	@echo "installing triton-mega into $(VENV) (torch is large: this takes minutes)"
	@if [ -n "$(PINS)" ] && $(VENV)/bin/python -m pip install --quiet $(PINS) -e '.[$(EXTRAS)]'; \
	then :; else \
	  [ -z "$(PINS)" ] || echo "the CI versions are not to be had here: a plain install instead"; \
	  $(VENV)/bin/python -m pip install --quiet -e '.[$(EXTRAS)]'; \
	fi
	@touch $@

clean:
	rm -rf $(VENV)
