# The whole of Bonfire from a fresh machine: `make demo`, `make test`.
# PRESET=release|debug|asan|tsan chooses the build; LIBTORCH=DIR an existing LibTorch.
PRESET ?= release
BUILD  := $(if $(filter release,$(PRESET)),build,build-$(PRESET))
JOBS   ?= $(shell nproc)

.PHONY: setup configure build test demo peers test-peers bench install format lint clean

setup:
	@setup/packages.sh

configure: setup
	@libtorch=$$(setup/libtorch.sh) && cmake --preset $(PRESET) -DBONFIRE_LIBTORCH=$$libtorch > $(BUILD).log 2>&1 \
	  && rm -f $(BUILD).log || { cat $(BUILD).log; rm -f $(BUILD).log; exit 1; }

build: configure
	@cmake --build $(BUILD) -j $(JOBS)

test: build
	@cd $(BUILD) && ctest --output-on-failure --no-tests=error

clean:
	rm -rf build build-*
