# Two words are all a newcomer needs: `make quickstart` and `make test`.
PYTHON ?= python3
READY := .venv/ready
RUN := .venv/bin/python

# Real images to a token-labeled transformer, and a report to look at.
quickstart: $(READY)
	$(RUN) tools/quickstart.py --out quickstart

# The same on photographs, with a teacher that ImageNet trained.
photos: $(READY)
	$(RUN) tools/photos.py --out photos

PYTEST := $(RUN) -m pytest -n auto --dist worksteal --durations 15
# The test suite without its slow tests.
test: $(READY)
	$(PYTEST) -m "not slow"

OLDEST := .venv-oldest/bin/python
# The same tests with every dependency at the lowest version that pyproject.toml allows, in an
# environment of its own (5 GB). ffcv is left out, whose numba needs a newer NumPy.
test-oldest:
	[ -x $(OLDEST) ] || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) -m pip install --disable-pip-version-check -q uv
	$(OLDEST) -m uv pip compile -q --resolution lowest-direct --extra dev --extra dali pyproject.toml -o .venv-oldest/floors.txt
	$(OLDEST) -m uv pip sync -q --python $(OLDEST) .venv-oldest/floors.txt
	$(OLDEST) -m pip install --disable-pip-version-check -q --no-deps -e .
	$(OLDEST) -m pytest -n auto --dist worksteal -m "not slow"

# The slow tests.
test-slow: $(READY)
	$(PYTEST) -m slow

JPEGS := manylinux_2_28_x86_64 manylinux_2_28_aarch64 macosx_11_0_arm64
# The native decoder for macOS (built), arm64 (run by qemu-user-static) and libjpeg-turbo 3; what is
# missing is named and its tests are skipped.
test-ports: $(READY)
	$(RUN) -m pip install --disable-pip-version-check -q -e ".[ports]"
	for one in $(JPEGS); do test -d .ports/$$one || $(RUN) -m pip install --disable-pip-version-check -q --no-deps \
		--only-binary :all: --ignore-requires-python --platform $$one --target .ports/$$one -r .ci/libjpeg.txt || exit; done
	$(RUN) -m pytest tests/native/test_ports.py

# The test suite as on other processors: three instruction sets on 1, 2 and 4 threads; an hour.
# ONLY="--instructions avx2 --threads 4 tests/models" makes it shorter.
test-processors: $(READY)
	nice $(RUN) tests/processors.py $(ONLY)

# Lint and format, only reports.
check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Lint and format, changes what it can.
fix: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The documentation as a web site in site/, strict: a broken link is an error.
docs: $(READY)
	$(RUN) -m pip install --disable-pip-version-check -q -e ".[docs]"
	$(RUN) -m mkdocs build

$(READY): .ci/set_up.sh pyproject.toml setup.py $(wildcard densefeed/native/*.[ch])
	PYTHON="$(PYTHON)" bash .ci/set_up.sh .venv
	touch $(READY)

# The tests that need a CUDA device, then measurements beside their goals; resumes where it stopped.
# Installs nothing: it runs in .venv or, where there is none, in Python's own environment, which
# needs PyTorch, timm and what pyproject.toml names.
gpu-check:
	$$([ -x $(RUN) ] && echo $(RUN) || echo $(PYTHON)) tools/gpu_check.py

# Loaders, targets, augmentation and whole steps beside all others; minutes, and rows in
# benchmarks/results.csv.
bench: $(READY)
	$(RUN) -m pip install --disable-pip-version-check -q -e ".[bench]" || \
		echo "not every other loader could be installed; those that are here are measured" >&2
	$(RUN) -m benchmarks.loaders --stages --json bench/loaders.json
	$(RUN) -m benchmarks.targets --json bench/targets.json
	$(RUN) -m benchmarks.targets --compare head --batch 64 --classes 21841 --rounds 3 --json bench/head.json
	$(RUN) -m benchmarks.targets --compare masks --batch 2 --classes 150 --grid 512 --side 64 --json bench/masks.json
	$(RUN) -m benchmarks.augment --json bench/augment.json
	$(RUN) -m benchmarks.store --json bench/store.json
	$(RUN) -m benchmarks.any_loop --json bench/any_loop.json
	$(RUN) -m benchmarks.relabel --json bench/relabel.json
	$(RUN) -m benchmarks.relabel --compile --precision bf16 --json bench/relabel-compiled.json
	$(RUN) -m benchmarks.step --batch 8 --objective token-label --steps 1 --json bench/step.json
	$(RUN) -m benchmarks.step --model lvvit_micro --size 64 --batch 32 --steps 16 --objective token-label --loader ffcv \
		--data bench/photographs-1024-1000/train.beton --json bench/step-loader.json

TRACK ?= micro
RECIPE ?= speedrun_micro
# The speedrun by the rules of records/README.md: five seeds, and with CHANGE="what changed" a row in
# its table. TRACK=imagenet needs RECIPE, DATA and VAL.
record: $(READY)
	$(RUN) -m benchmarks.record --track $(TRACK) --recipe $(RECIPE) $(if $(DATA),--data $(DATA)) $(if $(VAL),--val $(VAL)) \
		$(if $(CHANGE),--change "$(CHANGE)")

MINUTES ?= 10
KILLS ?= 20
ORIENTATIONS ?= 100
FILES ?= 2000
LEASES ?= 10000
# The native decoder on mutated files (four builds) for MINUTES of processor time, runs and passes
# killed KILLS times, LEASES claimed by four processes at once, every fault at every call of every
# writer, ORIENTATIONS planted for the audit, FILES hostile files, FILES hostile names and FILES altered checkpoints through the commands.
soak: $(READY)
	SOAK_MINUTES=$(MINUTES) nice -n 19 $(RUN) -m pytest -s tests/native/test_fuzz.py
	SOAK_KILLS=$(KILLS) $(RUN) -m pytest -s tests/test_resume.py tests/relabel/test_workers.py \
		tests/relabel/test_workers_in_storage.py \
		-k killed_at_random_times
	SOAK_LEASES=$(LEASES) $(RUN) -m pytest -s tests/system/test_leases.py -k contended
	SOAK_FAULTS=all $(RUN) -m pytest -s tests/test_writes.py
	SOAK_ORIENTATIONS=$(ORIENTATIONS) $(RUN) -m pytest -s tests/relabel/test_audit.py -k planted_orientations
	SOAK_FILES=$(FILES) $(RUN) -m pytest -s tests/test_hostile.py tests/tools/test_hostile_checkpoints.py

.PHONY: quickstart photos test test-slow test-oldest test-processors test-ports check fix docs gpu-check bench record soak
