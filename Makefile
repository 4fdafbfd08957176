# The whole of Bonfire from a fresh machine: `make demo`, `make test`. `make help` lists the rest.
# PRESET=release|debug|asan|tsan chooses the build; LIBTORCH=DIR an existing LibTorch; CUDA_ARCHS=all code for every GPU;
# UNITY=OFF, at the first build of a folder, compiles the library file by file: longer in all, less after an edit.
PRESET ?= release
BUILD  := $(if $(filter release,$(PRESET)),build,build-$(PRESET))
# What sees torch takes up to 1.5 GB to compile.
JOBS   ?= $(shell awk -v cores=$$(nproc) '/^MemAvailable/ { jobs = int($$2 / 1572864); if (jobs > cores) jobs = cores; print jobs < 1 ? 1 : jobs }' /proc/meminfo)
CUDA_ARCHS ?=
UNITY  ?= ON
PEERS  ?= peers
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
SOURCES = $(shell git ls-files '*.cpp' '*.h' '*.cu')

.PHONY: help setup configure build command test demo peers test-peers bench fuzz install format lint clean

# $(call configure,ON|OFF): what CMake says is shown only where it fails, and, beside a GPU, why that will not be used.
configure = @libtorch=$$(setup/libtorch.sh) || exit 1; \
  said=$$(cmake --preset $(PRESET) -DBONFIRE_LIBTORCH="$$libtorch" -DBONFIRE_BUILD_TESTS=$(1) -DBONFIRE_CUDA_ARCHS="$(CUDA_ARCHS)" \
    $$([ -f $(BUILD)/CMakeCache.txt ] || echo -DBONFIRE_UNITY=$(UNITY)) 2>&1) \
    || { printf '%s\n' "$$said" >&2; exit 1; }; \
  [ ! -e /proc/driver/nvidia/version ] || printf '%s\n' "$$said" | sed -n 's/^-- \(The CUDA plug-in is not built\|Attention on GPUs\)/\1/p'

help:
	@echo "make demo        train a small model on two local ranks"
	@echo "make test        build everything and run every test"
	@echo "make build       build everything; the command is $(BUILD)/bonfire"
	@echo "make install     build and install into PREFIX ($(PREFIX))"
	@echo "make peers       an environment with PyTorch, transformers and TensorBoard in PEERS ($(PEERS))"
	@echo "make test-peers  tests against those"
	@echo "make bench       benchmarks against those, into bench/results"
	@echo "make fuzz        fuzzes each reader of outside bytes for FUZZ_SECONDS ($(FUZZ_SECONDS)), with clang"
	@echo "make format      clang-format; make lint checks it and runs clang-tidy (FILES='...' for some files)"

setup:
	@setup/packages.sh build tests

configure: setup
	$(call configure,ON)

build: configure
	@cmake --build $(BUILD) -j $(JOBS)

# Without the tests and what they need.
command:
	@setup/packages.sh build
	$(call configure,OFF)
	@cmake --build $(BUILD) -j $(JOBS) --target command

test: build
	@cd $(BUILD) && { ctest --no-tests=error --parallel $$(( 2 * $(JOBS) )); code=$$?; \
	  for list in skipped failed; do awk -f ../tests/$$list.awk Testing/Temporary/LastTest.log; done; exit $$code; }

demo: command
	@$(BUILD)/bonfire train examples/demo.toml --ranks 2
	@echo; echo "The same model with parameters, gradients and optimizer state cut in two, for 20 steps:"
	@$(BUILD)/bonfire bench step examples/demo.toml --set layout.shard=2 --steps 20

install: command
	@cmake --install $(BUILD) --prefix $(PREFIX)

peers:
	@setup/peers.sh $(PEERS)

test-peers: build peers
	@cmake --build $(BUILD) -j $(JOBS) --target peer_probe
	@BONFIRE_BUILD=$(BUILD) $(PEERS)/bin/python -m unittest discover --start-directory tests/peers --pattern '*_test.py' --verbose

bench: command peers
	@setup/packages.sh bench
	@cmake -S . -B $(BUILD) -DBONFIRE_BUILD_BENCH=ON > /dev/null && cmake --build $(BUILD) -j $(JOBS) --target benchmarks
	@$(PEERS)/bin/python bench/run.py --peers $(PEERS) --command $(BUILD)/bonfire

fuzz:
	@setup/packages.sh build fuzz
	@JOBS=$(JOBS) tests/fuzz/fuzz.sh "$$(setup/libtorch.sh)" $(CURDIR)/build-fuzz $(FUZZ_SECONDS)

format:
	@setup/packages.sh lint
	@clang-format -i $(SOURCES)

FILES ?= $(filter %.cpp,$(filter bonfire/% cli/%,$(SOURCES)))
# Each file by itself, and with all that it includes.
lint: setup
	@setup/packages.sh lint
	@cmake --preset $(PRESET) -B build-lint -DBONFIRE_LIBTORCH="$$(setup/libtorch.sh)" -DBONFIRE_UNITY=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON > build-lint.log || { cat build-lint.log; exit 1; }
	@clang-format --dry-run -Werror $(SOURCES)
	@printf '%s\n' $(filter-out bonfire/cuda/%,$(FILES)) | xargs -n 1 -P $(JOBS) clang-tidy -p build-lint --quiet

clean:
	rm -rf build build-*
