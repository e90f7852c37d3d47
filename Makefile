# make demo   train a byte-level GPT with offloaded activations and compare its gradients with keep-all
# make test   the test suite without its slow tests, which MARK= adds (lint and types are tests of it)
# make lint   ruff and mypy alone
# make net    train every architecture of tests/net that docs/results/net.json lacks, and write docs/models.md (hours)
#
# The first target run makes .venv and installs into it; that is repeated only when what is installed or compiled changes.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
WORKERS ?= 3
PYTEST  ?=
MARK    ?= not long
DEMO    ?=

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP   := $(PY) -m pip --disable-pip-version-check

.PHONY: demo test lint net clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(PY) examples/train_gpt.py $(DEMO)

# Three workers for two cores, since some tests wait: a quarter of an hour. The longest tests as well: make test MARK=. The
# tests of streams and time want the device to themselves: make test WORKERS=0 PYTEST=tests/gpu
test: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "$(MARK)" $(PYTEST)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

# NET="--inner aot_eager --only llama vit" runs these, and again where they were run before; what the page shows is kept.
net: NET ?= --missing
net: $(STAMP)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(PY) -m net.runner $(NET); status=$$?; PYTHONPATH=.:tests $(PY) -m net.page; exit $$status

# torch first and pinned, then held by a constraint: nothing that follows may bring another torch along.
$(STAMP): pyproject.toml setup.py graphoffload/runtime/streams/copy.c
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$(TORCH)"
	echo "$(TORCH)" > $(VENV)/constraints.txt
	$(PIP) install --quiet -c $(VENV)/constraints.txt "setuptools>=77" wheel
	$(PIP) install --quiet -c $(VENV)/constraints.txt --no-build-isolation -e ".[test,examples,viz]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
