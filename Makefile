# Each target does its own set-up in .venv; nothing needs to be installed by hand but Python >= 3.11, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 4
PYTEST ?= $(BIN)/pytest
GPU_RUNTIME ?= cuda
RUN = $(BIN)/mpiexec -n $(RANKS) $(BIN)/python -m mpi4py
SOURCES := $(shell find device proxy channels src -name '*.py' -o -name '*.c' -o -name '*.cpp' -o -name '*.h') setup.py pyproject.toml

# Libraries that forward HIP's calls to something that is here (tests/hip), in a directory for ROCM_PATH.
ROCM_ON_HOST := build/rocm-on-host
ROCM_ON_CUDA := build/rocm-on-cuda
FORWARD = mkdir -p $(@D) && $(CXX) -std=c++17 -O2 -Wall -Wextra -fPIC -shared -fvisibility=hidden -pthread \
  -Idevice/host -Idevice/include $(filter %.cpp,$^) -ldl -o $@
HIP_TESTS := test_smoke.py test_channels.py test_ring.py test_engine.py test_topology.py test_memory.py test_failure.py test_staged_transport.py \
  test_collectives.py::test_ranks_as_processes test_collectives.py::test_moves_bytes_of_any_type \
  test_dispatch_combine.py::test_sizes \
  test_gpu.py::test_what_waits_for_the_device_is_called_when_what_was_launched_is_done \
  test_gpu.py::test_a_handle_that_leaves_the_memory_that_it_names_is_refused
FIND_NVRTC := import glob, nvidia; print(max(p for r in nvidia.__path__ for p in glob.glob(r + "/**/libnvrtc.so.*", recursive=True)))
# What is run with the proxies in the node daemon as a matter of course; all of it: make test-daemon DAEMON_TESTS=tests
DAEMON_TESTS ?= $(addprefix tests/,test_channels.py test_ring.py test_engine.py test_memory.py test_failure.py \
  test_collectives.py::test_ranks_as_processes test_dispatch_combine.py::test_sizes)
SOFT_ROCE := tests/soft_roce
RDMA_PYTEST := -p no:hypothesispytest -p no:cacheprovider  # what an emulated CPU need not load

.PHONY: demo test test-daemon test-hip test-rdma test-hip-on-cuda rocm-on-host rocm-on-cuda fake-verbs test-gpu gpu-report coverage bench bench-gpu bench-rdma bench-page lint clean

demo: $(VENV)/.installed
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed lint
	$(BIN)/pytest tests
	$(MAKE) test-daemon
	$(MAKE) test-hip
	$(MAKE) test-rdma

# The behaviour tests with the proxies of all ranks in one node daemon.
test-daemon: $(VENV)/.installed
	PROXYCCL_PROXY=daemon $(BIN)/pytest $(DAEMON_TESTS)

# The HIP runtime through hip-python, on the host runtime.
test-hip: $(VENV)/.installed rocm-on-host
	ROCM_PATH=$(CURDIR)/$(ROCM_ON_HOST) PROXYCCL_RUNTIME=hip $(BIN)/pytest $(HIP_TESTS:%=tests/%)

# RDMA, in a virtual machine with Soft-RoCE. Where that can't be had it is skipped, unless PROXYCCL_REQUIRE_RDMA is 1.
test-rdma: $(VENV)/.installed
	@if reason=$$($(BIN)/python $(SOFT_ROCE)/fetch_machine.py build/soft-roce); then \
	  export PROXYCCL_CACHE=$(CURDIR)/build/rdma-cache && $(BIN)/python tests/rdma/kernels.py && \
	  $(BIN)/python $(SOFT_ROCE)/machine.py -- env PROXYCCL_CACHE=$$PROXYCCL_CACHE $(BIN)/pytest $(RDMA_PYTEST) tests/rdma && \
	  $(BIN)/python $(SOFT_ROCE)/machine.py --nodes 2 --cores 1 -- env PROXYCCL_CACHE=$$PROXYCCL_CACHE $(BIN)/python tests/rdma/two_machines.py; \
	elif [ $$? = 2 ] && [ "$$PROXYCCL_REQUIRE_RDMA" != 1 ]; then \
	  echo "test-rdma is skipped: $$reason"; \
	else \
	  echo "test-rdma can't run: $$reason"; exit 1; \
	fi

coverage: $(VENV)/.installed
	$(BIN)/pytest tests --ignore tests/test_sanitizer.py --cov --cov-report=term

# On a machine with GPUs. Where its own Python has the packages: make test-gpu PYTEST="python3 -m pytest"
test-gpu: $(if $(filter $(BIN)/%,$(PYTEST)),$(VENV)/.installed)
	PROXYCCL_RUNTIME=$(GPU_RUNTIME) $(PYTEST) tests

bench: $(VENV)/.installed
	$(BIN)/proxyccl bench ring
	$(RUN) $(BIN)/proxyccl bench all_reduce

# All benchmarks on this machine's GPUs, beside the peers of its own Python's torch:
#   make bench-gpu RANKS=4 MPIEXEC="mpirun --allow-run-as-root" GPU_PYTHON=python3
MPIEXEC ?= $(BIN)/mpiexec
GPU_PYTHON ?= $(BIN)/python
RESULTS := benchmarks/results
bench-gpu:
	$(MPIEXEC) -n $(RANKS) $(GPU_PYTHON) -m mpi4py benchmarks/all_reduce.py --json $(RESULTS)/all_reduce_$(RANKS).json
	$(MPIEXEC) -n $(RANKS) $(GPU_PYTHON) -m mpi4py benchmarks/all_to_all.py --json $(RESULTS)/all_to_all_$(RANKS).json
	$(MPIEXEC) -n $(RANKS) $(GPU_PYTHON) -m mpi4py benchmarks/expert_parallel.py --json $(RESULTS)/expert_parallel_$(RANKS).json
	$(MPIEXEC) -n 2 $(GPU_PYTHON) -m mpi4py benchmarks/put_signal.py --json $(RESULTS)/put_signal_2.json
	$(MPIEXEC) -n 2 $(GPU_PYTHON) -m mpi4py benchmarks/launch_cost.py --json $(RESULTS)/launch_cost_2.json
	$(MPIEXEC) -n $(RANKS) $(GPU_PYTHON) -m mpi4py benchmarks/daemon.py --json $(RESULTS)/daemon_$(GPU_RUNTIME)_$(RANKS).json
	$(GPU_PYTHON) benchmarks/observing.py --json $(RESULTS)/observing_$(GPU_RUNTIME).json
	$(GPU_PYTHON) -m proxyccl bench ring --json $(RESULTS)/ring_1.json
	$(GPU_PYTHON) benchmarks/report.py

# All that a machine with RANKS GPUs shows: behaviour, the examples among it, with proxies in the ranks and in the daemon; then the
# figures. Arguments as above, and PYTEST="python3 -m pytest" where test-gpu needs it.
gpu-report: test-gpu
	PROXYCCL_RUNTIME=$(GPU_RUNTIME) PROXYCCL_PROXY=daemon $(PYTEST) $(DAEMON_TESTS)
	$(MAKE) bench-gpu

# RDMA in the machine with Soft-RoCE, which keeps no files: the report comes out behind the tables.
bench-rdma: $(VENV)/.installed
	$(BIN)/python $(SOFT_ROCE)/machine.py --timeout 600 -- sh -c "$(BIN)/python benchmarks/rdma_writes.py \
	  --json /tmp/rdma_writes.json && cat /tmp/rdma_writes.json" > build/rdma_writes.txt
	sed '/^{$$/,/^}$$/d' build/rdma_writes.txt
	sed -n '/^{$$/,/^}$$/p' build/rdma_writes.txt > $(RESULTS)/rdma_writes.json

bench-page: $(VENV)/.installed
	$(BIN)/python benchmarks/report.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy -p proxyccl

# The same on an NVIDIA GPU. Where its own Python has the packages: make test-hip-on-cuda PYTEST="python3 -m pytest"
test-hip-on-cuda: rocm-on-cuda
	ROCM_PATH=$(CURDIR)/$(ROCM_ON_CUDA) PROXYCCL_RUNTIME=hip \
	  PROXYCCL_NVRTC=$$($(patsubst %/pytest,%/python,$(firstword $(PYTEST))) -c '$(FIND_NVRTC)') $(PYTEST) tests

rocm-on-host: $(ROCM_ON_HOST)/lib/libamdhip64.so $(ROCM_ON_HOST)/lib/libhiprtc.so
rocm-on-cuda: $(ROCM_ON_CUDA)/lib/libamdhip64.so $(ROCM_ON_CUDA)/lib/libhiprtc.so

$(ROCM_ON_HOST)/lib/libamdhip64.so: tests/hip/amdhip64_on_host.cpp tests/hip/hip_api.h $(wildcard device/host/*.cpp device/host/*.h)
	$(FORWARD)
$(ROCM_ON_HOST)/lib/libhiprtc.so: tests/hip/hiprtc_on_host.cpp tests/hip/hip_api.h
	$(FORWARD)
$(ROCM_ON_CUDA)/lib/libamdhip64.so: tests/hip/amdhip64_on_cuda.cpp tests/hip/hip_api.h
	$(FORWARD)
$(ROCM_ON_CUDA)/lib/libhiprtc.so: tests/hip/hiprtc_on_cuda.cpp tests/hip/hip_api.h
	$(FORWARD)

# The device that the tests of the verbs transport post to (tests/verbs).
FAKE_VERBS := build/fake-verbs
fake-verbs: $(FAKE_VERBS)/libfake_device.so
$(FAKE_VERBS)/libfake_device.so: tests/verbs/fake_device.c tests/verbs/fake_device.h
	mkdir -p $(@D) && $(CC) -std=gnu11 -O2 -Wall -Wextra -fPIC -shared -pthread -Ibuild/rdma-headers/usr/include $(filter %.c,$^) -o $@

$(VENV)/.locked: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

$(VENV)/.installed: $(VENV)/.locked $(SOURCES)
	@reason=$$($(BIN)/python $(SOFT_ROCE)/fetch_headers.py build/rdma-headers) || \
	  { [ $$? = 2 ] && echo "The engine is built without RDMA: $$reason"; }
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable . --config-settings editable_mode=strict
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
