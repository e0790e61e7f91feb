# Each target does its own set-up in .venv; nothing needs to be installed by hand but Python >= 3.11, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 4
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
PYTEST ?= $(BIN)/pytest
CORES := $(shell nproc)
at_most_8 = $(shell echo $$(($1 < 8 ? $1 : 8)))
# Tests wait as much as they compute, so there are more workers than cores.
WORKERS ?= $(call at_most_8,$(CORES) + 2)
WORKERS_PYTEST = PROXYCCL_CACHE=$(CURDIR)/build/test-cache $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations 20
# As tests/conftest.py sets it, for kernels that are compiled before the tests.
FAST_COMPILER := PROXYCCL_CXXFLAGS=-O0
# The tests with a marker. Every worker imports the files that it is given: those without one stay out.
marked = $(SLOW) -m "$(1)$(if $(SLOW), and slow)$(2)" $(shell grep -rlw --include='test_*.py' 'mark\.$(1)' tests)
# SLOW=--slow has a target run only its tests marked slow, which it leaves out otherwise.
SLOW ?=
slow_alone = $(if $(SLOW),--slow -m slow)
GPU_RUNTIME ?= cuda
RUN = $(BIN)/mpiexec -n $(RANKS) $(BIN)/python -m mpi4py
C_SOURCES = $(shell find device proxy channels faces tools benchmarks tests -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp')
SOURCES := $(shell find device proxy channels faces tools src -name '*.py' -o -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp') setup.py pyproject.toml

# Libraries that forward HIP's calls to something that is here (tests/support/hip), in a directory for ROCM_PATH.
ROCM_ON_HOST := build/rocm-on-host
ON_HIP := ROCM_PATH=$(CURDIR)/$(ROCM_ON_HOST) PROXYCCL_RUNTIME=hip
ROCM_ON_CUDA := build/rocm-on-cuda
FORWARD = $(call step,CXX,$@); mkdir -p $(@D) && $(CXX) -std=c++17 -O1 -Wall -Wextra -fPIC -shared -fvisibility=hidden -pthread \
  -Idevice -Idevice/memory -Idevice/host -Idevice/include $(filter %.cpp,$^) -ldl -o $@
FIND_NVRTC := import glob, nvidia; print(max(p for r in nvidia.__path__ for p in glob.glob(r + "/**/libnvrtc.so.*", recursive=True)))
SOFT_ROCE := tests/support/soft_roce
RDMA_CORES ?= 1
RDMA_PYTEST := -p pytest_timeout -p no:cacheprovider  # an emulated CPU need not load more

# Each step prints a line, and its command only if V=1. `quietly` shows a command's output if it fails.
MAKEFLAGS += --no-print-directory
ifndef V
.SILENT:
endif
step = $(if $(findstring s,$(firstword -$(MAKEFLAGS))),:,printf '  %-8s%s\n' '$1' '$2')
quietly = $(call step,$1,$2); said=$$($3 2>&1) || { printf '%s\n' "$$said"; exit 1; }

# Tests start a thousand processes: they shall not compile every module again, where that is turned off.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-all test-host test-daemon test-hip test-models test-faults test-rdma test-hip-on-cuda test-torch test-triton test-numba test-sglang test-vllm rocm-on-host rocm-on-cuda fake-verbs fake-fabric bare-loops test-gpu gpu-report coverage bench bench-gpu bench-rdma bench-fabric bench-page signatures lint docs docs-test wheel clean

demo:
	$(MAKE) --jobs 2 $(VENV)/.built
	$(BIN)/python examples/demo.py

# Lint and the tests that need no GPU, except those marked slow. The machine with Soft-RoCE is work for one core, and so is
# most of what precedes the tests: so two things are done at a time, on the host and elsewhere. All but the machine is nice
# to it, where everything takes 15 times as long.
test:
	$(MAKE) --jobs 3 $(VENV)/.installed fetched
	$(MAKE) --jobs 3 test-on-host test-elsewhere

# Those that take seconds of a core each (marked slow): sanitizers, compilers for GPUs, models, hosts, processes. And what runs
# once more on the HIP runtime.
test-slow:
	$(MAKE) --jobs 4 $(VENV)/.installed rocm-on-host fetched fetched-hiprtc
	$(MAKE) --jobs 2 slow-on-host slow-elsewhere
slow-on-host:
	nice -n 5 $(MAKE) test-host SLOW=--slow
slow-elsewhere:
	+$(call in_one_piece,test-rdma,SLOW=--slow)
	+$(call in_one_piece,test-daemon,SLOW=--slow nice -n 5)
	+$(call in_one_piece,test-hip,nice -n 5)

# And what both leave out: the further cases of matrices (marked full), the whole suite through the daemon, with kernels as
# users compile them, more ranks on the HIP runtime, two cores for the proxies over RDMA.
test-all: test test-slow
	$(call step,TEST,further cases)
	$(WORKERS_PYTEST) --full -m full
	$(call step,TEST,all with proxies in one node daemon)
	PROXYCCL_PROXY=daemon PROXYCCL_CXXFLAGS=-O3 $(WORKERS_PYTEST) --full
	$(MAKE) test-hip HIP_PROXY=process FULL=--full
	$(call step,TEST,collectives of more ranks on the HIP runtime)
	$(ON_HIP) $(WORKERS_PYTEST) tests/collectives --full -k "ranks_as_processes or same_bits"
	$(MAKE) test-rdma RDMA_CORES=2 FULL=--full

.PHONY: fetched fetched-hiprtc test-on-host test-elsewhere slow-on-host slow-elsewhere prepare-tests
# The largest things that tests fetch, while pip waits for the network too. If one can't be fetched, its tests say so.
fetched:
	$(call step,FETCH,the machine with Soft-RoCE)
	mkdir -p build
	$(PYTHON) $(SOFT_ROCE)/fetch_machine.py build/soft-roce > build/fetched.log || test $$? = 2
fetched-hiprtc:
	$(call step,FETCH,HIPRTC)
	mkdir -p build
	$(PYTHON) tests/support/hip/fetch_hiprtc.py build/hiprtc > build/fetched-hiprtc.log || test $$? = 2
test-on-host:
	nice -n 5 $(MAKE) lint prepare-tests
	nice -n 5 $(MAKE) test-host
test-elsewhere: # the output of each part in one piece, when it has ended
	+$(call in_one_piece,test-rdma)
	+$(call in_one_piece,test-daemon,nice -n 5)
in_one_piece = $2 $(MAKE) $1 WORKERS=$(call at_most_8,$(CORES)) > build/$@-$1.log 2>&1; \
  status=$$?; cat build/$@-$1.log; exit $$status

# On all cores; tests compile other kernels as they go. Collected once, Python files are compiled once and not by every worker.
prepare-tests: $(VENV)/.installed
	$(call quietly,COMPILE,kernels,PROXYCCL_CACHE=$(CURDIR)/build/test-cache $(FAST_COMPILER) $(BIN)/proxyccl compile)
	$(call quietly,COLLECT,tests,$(BIN)/pytest --collect-only -qq)

test-host: $(VENV)/.installed
	$(call step,TEST,on the host runtime)
	$(WORKERS_PYTEST) $(slow_alone)

# Once more with the proxies in one node daemon: of each worker's ranks.
test-daemon: $(VENV)/.installed
	$(call step,TEST,with proxies in one node daemon)
	PROXYCCL_PROXY=daemon $(WORKERS_PYTEST) $(call marked,daemon)

# Once more on the HIP runtime through hip-python, whose calls go to the host runtime. HIP_PROXY: where its proxies run; by
# default in a process of the job's own, which test-all tests.
HIP_PROXY ?= thread
test-hip: $(VENV)/.installed rocm-on-host
	$(call step,TEST,on the HIP runtime over the host)
	PROXYCCL_PROXY=$(HIP_PROXY) $(ON_HIP) $(WORKERS_PYTEST) --slow $(FULL) $(call marked,hip,$(if $(FULL),, and not hip_full))

# The models alone. DEPTH multiplies the executions at random, and from 2 on adds larger models and bounds.
DEPTH ?= 1
test-models: $(VENV)/.installed
	$(call step,TEST,models)
	PROXYCCL_MODELS_DEPTH=$(DEPTH) $(WORKERS_PYTEST) --timeout $(if $(filter 1,$(DEPTH)),300,7200) --slow tests/models

# Random verified work with faults at random: make test-faults COUNT=1000 SEED=1. Each case follows from its seed. As many
# cases of agents that come and go follow, of memory that is freed under transfers, of mixtures of experts whose ranks are
# killed and replaced, and of torch groups in random orders of first use, where make test-torch has made an environment with torch. JOBS cases
# run at once; a case has up to 4 ranks. HOSTS=1 puts the ranks on two hosts, which are network namespaces: that needs root,
# and cases run one after another.
COUNT ?= 100
SEED ?= 1
JOBS ?= 1
HOSTS ?=
test-faults: $(VENV)/.installed
	$(call step,TEST,random work with faults at random)
	$(BIN)/python tests/support/faults/campaign.py --count $(COUNT) --seed $(SEED) --jobs $(JOBS) $(if $(HOSTS),--hosts) \
	  --report build/faults-$(SEED)-$(COUNT)$(if $(HOSTS),-hosts).txt
	$(if $(HOSTS),,$(BIN)/python tests/support/faults/agents.py --count $(COUNT) --seed $(SEED))
	$(if $(HOSTS),,$(BIN)/python -W ignore tests/support/faults/freed_memory.py --count $(COUNT) --seed $(SEED))
	$(if $(HOSTS),,$(BIN)/python tests/support/faults/healing.py --count $(COUNT) --seed $(SEED))
	$(if $(HOSTS),,$(firstword $(wildcard $(TORCH_VENVS:%=%/bin/python)) $(BIN)/python) tests/support/faults/torch_groups.py --count $(COUNT) --seed $(SEED))

# RDMA, in a virtual machine with Soft-RoCE. Where it can't be set up the tests are skipped, unless PROXYCCL_REQUIRE_RDMA is 1.
# In there root runs the tests, who does not take another user's kernels: so it copies them.
WITH_RDMA_CACHE = sh -c 'cp -r build/rdma-cache /run && PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OPENBLAS_NUM_THREADS=1 PROXYCCL_CACHE=/run/rdma-cache $(FAST_COMPILER) exec "$$0" "$$@"'
test-rdma: $(VENV)/.installed
	$(call step,TEST,RDMA on Soft-RoCE)
	if reason=$$($(BIN)/python $(SOFT_ROCE)/fetch_machine.py build/soft-roce); then \
	  $(BIN)/python tests/support/packages/fetch_fabric.py build/fabric; \
	  PROXYCCL_CACHE=$(CURDIR)/build/test-cache $(FAST_COMPILER) $(BIN)/python $(SOFT_ROCE)/kernels.py build/rdma-cache && \
	  $(BIN)/python $(SOFT_ROCE)/machine.py --cores $(RDMA_CORES) -- $(WITH_RDMA_CACHE) $(BIN)/python $(SOFT_ROCE)/run_tests.py $(RDMA_PYTEST) $(slow_alone) $(FULL) tests/rdma/soft_roce$(if $(FULL), && \
	  $(BIN)/python $(SOFT_ROCE)/machine.py --nodes 2 --cores 1 -- $(WITH_RDMA_CACHE) $(BIN)/python tests/rdma/soft_roce/two_machines.py); \
	elif [ $$? = 2 ] && [ "$$PROXYCCL_REQUIRE_RDMA" != 1 ]; then \
	  echo "test-rdma is skipped: $$reason"; \
	else \
	  echo "test-rdma can't run: $$reason"; exit 1; \
	fi

# torch's own tests of torch.distributed and ours, by this backend, and programs that import deep_ep: with a torch in
# which Python can be a Backend, and with an older one. Each has an environment of its own, of gigabytes, that shares all but torch with .venv.
TORCH_VENVS := .venv-torch .venv-torch-older
TORCH_RANKS ?= 4 8
EXPERTS_WITH_TORCH := tests/experts/test_gradients.py tests/experts/test_layer_with_torch.py
test-torch: $(TORCH_VENVS:%=%/.installed) rocm-on-host
	set -e; for venv in $(TORCH_VENVS); do \
	  echo "  TEST    torch, in $$venv"; \
	  $$venv/bin/python -m pytest -p no:cacheprovider tests/torch_backend tests/deep_ep_clients $(EXPERTS_WITH_TORCH); \
	  $$venv/bin/python -m pytest -p no:cacheprovider docs -k "pytorch or deepep or torchrun"; \
	  for ranks in $(TORCH_RANKS); do \
	    log=build/test-torch$${venv#.venv-torch}-$$ranks.log; echo "torch's own tests on $$ranks ranks: $$log"; \
	    BACKEND=proxyccl WORLD_SIZE=$$ranks $$venv/bin/python tests/torch_backend/distributed_tests.py > $$log 2>&1 || \
	      { grep -a -A 40 '^ERROR: test\|^FAIL: test' $$log; exit 1; }; \
	    grep -a '^Ran\|^skipped [0-9]' $$log; \
	  done; \
	done

# The tests of kernels in Triton with the oldest Triton that is supported; make test has the newest.
test-triton: .venv-triton-older/.installed
	$(call step,TEST,kernels in Triton)
	.venv-triton-older/bin/python -m pytest -p no:cacheprovider --slow tests/triton_kernels

# The tests of kernels in Numba, in an environment of its own. They compile and link for GPUs; without one no kernel runs.
test-numba: .venv-numba/.installed
	$(call step,TEST,kernels in Numba)
	.venv-numba/bin/python -m pytest -p no:cacheprovider tests/numba_kernels

# SGLang's own groups, layers and dispatchers on CPU ranks, with the plug-in, in an environment of its own.
test-sglang: .venv-sglang/.installed
	$(call step,TEST,SGLang with the plug-in)
	.venv-sglang/bin/python -m pytest -p no:cacheprovider tests/sglang_plugin

# vLLM's groups, its compiler's passes and its KV connector with packages/vllm, on CPUs, in an environment of 2 GB.
test-vllm: .venv-vllm/.installed
	$(call step,TEST,vLLM with packages/vllm)
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable packages/vllm --editable packages/nixl
	.venv-vllm/bin/python -m pytest -p no:cacheprovider tests/vllm_plugin

.venv-sglang/.installed: requirements-sglang.lock
.venv-numba/.installed: requirements-numba.lock
.venv-vllm/.installed: requirements-vllm.lock
.venv-triton-older/.installed: requirements-triton-older.lock
.venv-torch/.installed: requirements-torch.lock
.venv-torch-older/.installed: requirements-torch-older.lock
OWN_VENVS := $(TORCH_VENVS) .venv-triton-older .venv-numba .venv-sglang .venv-vllm
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
$(OWN_VENVS:%=%/.installed): | $(VENV)/.installed
	$(call step,INSTALL,$(@D))
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	echo "import site; site.addsitedir('$(CURDIR)/$$(cd $(VENV) && bin/python -c '$(SITE_PACKAGES)' | sed 's|.*/$(VENV)/|$(VENV)/|')')" \
	  > $$($(@D)/bin/python -c '$(SITE_PACKAGES)')/proxyccl.pth
	touch $@

coverage: $(VENV)/.installed
	$(call step,TEST,with coverage)
	$(WORKERS_PYTEST) --slow --ignore tests/runtime/test_sanitizer.py --cov --cov-report=term

# On a machine with GPUs. Where its own Python has the packages: make test-gpu PYTEST="python3 -m pytest"
test-gpu: $(if $(filter $(BIN)/%,$(PYTEST)),$(VENV)/.installed)
	$(call step,TEST,on GPUs)
	PROXYCCL_RUNTIME=$(GPU_RUNTIME) $(PYTEST) tests --full

bench: $(VENV)/.built bare-loops
	$(BIN)/python benchmarks/ring.py
	$(RUN) benchmarks/collectives.py all_reduce

# All benchmarks on this machine's GPUs, beside the peers of its own Python's torch:
#   make bench-gpu RANKS=4 MPIEXEC="mpirun --allow-run-as-root" GPU_PYTHON=python3
MPIEXEC ?= $(BIN)/mpiexec
GPU_PYTHON ?= $(BIN)/python
RESULTS := benchmarks/results
# A benchmark's program as ranks: their number, its name, and what the name of its results has before that number.
measure = $(call step,BENCH,$2); $(MPIEXEC) -n $1 $(GPU_PYTHON) -m mpi4py benchmarks/$2.py --json $(RESULTS)/$2$3_$1.json
bench-gpu: bare-loops
	$(call step,BENCH,programs)
	$(GPU_PYTHON) benchmarks/programs.py --ranks $(RANKS) --mpiexec "$(MPIEXEC)" --json $(RESULTS)/programs_$(RANKS).json
	$(call measure,$(RANKS),all_reduce)
	$(call measure,$(RANKS),all_gather)
	$(call measure,$(RANKS),all_to_all)
	$(call measure,$(RANKS),overlap)
	$(call measure,$(RANKS),expert_parallel)
	$(call measure,$(RANKS),deep_ep_buffer)
	$(call measure,$(RANKS),norms)
	$(call measure,2,put_signal)
	$(call measure,2,launch_cost)
	$(call measure,$(RANKS),daemon,_$(GPU_RUNTIME))
	$(call measure,2,proxy_place,_$(GPU_RUNTIME))
	export CUDA_MODULE_LOADING=EAGER; $(call measure,$(RANKS),after_a_rest,_$(GPU_RUNTIME))
	$(call measure,2,triton_kernels)
	$(call step,BENCH,observing)
	$(GPU_PYTHON) benchmarks/observing.py --json $(RESULTS)/observing_$(GPU_RUNTIME).json
	$(call step,BENCH,first_result)
	$(GPU_PYTHON) benchmarks/first_result.py --mpiexec "$(MPIEXEC)" --json $(RESULTS)/first_result_$(GPU_RUNTIME)_2.json
	$(call step,BENCH,ring)
	$(GPU_PYTHON) benchmarks/ring.py --json $(RESULTS)/ring_1.json
	$(GPU_PYTHON) benchmarks/results_page.py

# All that a machine with RANKS GPUs shows: behaviour, the examples among it, with proxies in the ranks and in the daemon; then the
# figures. Arguments as above, and PYTEST="python3 -m pytest" where test-gpu needs it.
gpu-report: test-gpu
	$(call step,TEST,on GPUs with proxies in one node daemon)
	PROXYCCL_RUNTIME=$(GPU_RUNTIME) PROXYCCL_PROXY=daemon $(PYTEST) --full -m daemon
	$(MAKE) bench-gpu

# RDMA in the machine with Soft-RoCE, which keeps no files: the results are printed after the tables.
bench-rdma: $(VENV)/.installed bare-loops
	$(call step,BENCH,rdma_writes)
	$(BIN)/python $(SOFT_ROCE)/machine.py --timeout 600 -- sh -c "$(BIN)/python benchmarks/rdma_writes.py \
	  --json /tmp/rdma_writes.json && cat /tmp/rdma_writes.json" > build/rdma_writes.txt
	sed '/^{$$/,/^}$$/d' build/rdma_writes.txt
	sed -n '/^{$$/,/^}$$/p' build/rdma_writes.txt > $(RESULTS)/rdma_writes.json

# Writes through libfabric, beside iperf3 and fi_pingpong, which are fetched where they can be; and all_reduce between two
# hosts of two ranks, which are network namespaces of this machine, beside MPI and gloo.
bench-fabric: $(VENV)/.installed .venv-torch/.installed bare-loops
	$(BIN)/python tests/support/packages/fetch_network_peers.py build/network-peers || test $$? = 2
	$(call step,BENCH,fabric_writes)
	$(BIN)/python tests/support/hosts/run_on_hosts.py -- $(BIN)/python \
	  benchmarks/fabric_writes.py --provider tcp --interface lo --peers build/network-peers --json $(RESULTS)/fabric_writes.json
	$(call step,BENCH,all_reduce between hosts)
	$(BIN)/python tests/support/hosts/run_on_hosts.py 2 2 -- env MPI4PY_LIBMPI=$(CURDIR)/$(VENV)/lib/libmpi.so.12 \
	  .venv-torch/bin/python -m mpi4py \
	  benchmarks/host_collectives.py --collectives all_reduce --gloo --sizes 1K 8K 64K 512K 4M 16M 64M \
	  --json $(RESULTS)/between_hosts_4.json

bench-page: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check "matplotlib>=3.8"  # the extra `bench`
	$(BIN)/python benchmarks/results_page.py

# The reference's pages for readers without the site, after a change of a public signature or its documentation.
signatures: $(VENV)/.installed
	$(BIN)/python docs/render_reference.py

# A wheel for other machines too (manylinux, by auditwheel), and the sdist that it is built from. So no earlier build gets
# in. LDSHARED: Python's own may name directories of this machine. auditwheel looks for patchelf in PATH.
WHEEL := build/wheel
wheel: $(VENV)/.wheel-tools
	$(call step,BUILD,$(WHEEL))
	rm -rf $(WHEEL)
	CPPFLAGS="-I$(CURDIR)/build/rdma-headers/usr/include -I$(CURDIR)/build/fabric-headers/usr/include -DPROXYCCL_LINK_OLD_SYMBOLS" LDSHARED="$(CC) -shared" \
	  PROXYCCL_SHIP_KERNELS=1 $(BIN)/python -m build --quiet --no-isolation --outdir $(WHEEL)/built .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --strip --wheel-dir $(WHEEL) $(WHEEL)/built/*.whl
	mv $(WHEEL)/built/*.tar.gz $(WHEEL) && rm -r $(WHEEL)/built
	$(BIN)/python tests/wheel/check_distributions.py $(WHEEL)
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir $(WHEEL)/deep_ep packages/deep_ep
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir $(WHEEL)/nixl packages/nixl
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --wheel-dir $(WHEEL)/vllm packages/vllm

# The documentation, as a site. Warnings are errors, a broken link among them; so is a public name without a docstring.
DOCS := build/docs
DOXYGEN := build/doxygen
docs: $(VENV)/.docs-tools
	$(call step,BUILD,$(DOCS)/html)
	command -v doxygen > /dev/null || $(BIN)/python tests/support/packages/fetch_packages.py $(DOXYGEN) doxygen
	mkdir -p $(DOCS)/doxygen
	PATH="$$PATH:$(DOXYGEN)/usr/bin" LD_LIBRARY_PATH="$$LD_LIBRARY_PATH:$$(echo $(DOXYGEN)/usr/lib/*-linux-gnu)" doxygen docs/Doxyfile
	$(BIN)/python docs/public_names.py $(DOCS)/doxygen/xml
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs $(DOCS)/html

# Every program and every command on its pages and in README runs, on the host runtime.
docs-test: $(VENV)/.docs-tools
	$(call step,TEST,programs and commands of the documentation)
	PROXYCCL_CACHE=$(CURDIR)/build/docs-cache $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal docs

lint: $(VENV)/.installed
	$(call quietly,LINT,ruff check,$(BIN)/ruff check .)
	$(call quietly,LINT,ruff format,$(BIN)/ruff format --check .)
	$(call quietly,LINT,clang-format,$(BIN)/clang-format --dry-run -Werror $(C_SOURCES))
	$(call quietly,LINT,mypy,$(BIN)/mypy -p proxyccl)
	$(call quietly,LINT,import-linter,$(BIN)/lint-imports --no-logo --no-cache)
	$(call quietly,LINT,C between rooms,$(BIN)/python docs/c_order.py)
	$(call quietly,LINT,prose,$(BIN)/python docs/dialect.py)
	$(call quietly,LINT,reference,$(BIN)/python docs/render_reference.py --check)

# The same on an NVIDIA GPU. Where its own Python has the packages: make test-hip-on-cuda PYTEST="python3 -m pytest"
test-hip-on-cuda: rocm-on-cuda
	$(call step,TEST,on the HIP runtime over CUDA)
	ROCM_PATH=$(CURDIR)/$(ROCM_ON_CUDA) PROXYCCL_RUNTIME=hip \
	  PROXYCCL_NVRTC=$$($(patsubst %/pytest,%/python,$(firstword $(PYTEST))) -c '$(FIND_NVRTC)') $(PYTEST) --slow tests

rocm-on-host: $(ROCM_ON_HOST)/lib/libamdhip64.so $(ROCM_ON_HOST)/lib/libhiprtc.so
rocm-on-cuda: $(ROCM_ON_CUDA)/lib/libamdhip64.so $(ROCM_ON_CUDA)/lib/libhiprtc.so

$(ROCM_ON_HOST)/lib/libamdhip64.so: tests/support/hip/amdhip64_on_host.cpp tests/support/hip/hip_api.h $(wildcard device/host/*.cpp device/host/*.h)
	$(FORWARD)
$(ROCM_ON_HOST)/lib/libhiprtc.so: tests/support/hip/hiprtc_on_host.cpp tests/support/hip/hip_api.h
	$(FORWARD)
$(ROCM_ON_CUDA)/lib/libamdhip64.so: tests/support/hip/amdhip64_on_cuda.cpp tests/support/hip/hip_api.h
	$(FORWARD)
$(ROCM_ON_CUDA)/lib/libhiprtc.so: tests/support/hip/hiprtc_on_cuda.cpp tests/support/hip/hip_api.h
	$(FORWARD)

# The device that the tests of the verbs transport post to (tests/support/fakes).
FAKE_VERBS := build/fake-verbs
fake-verbs: $(FAKE_VERBS)/libfake_device.so
$(FAKE_VERBS)/libfake_device.so: tests/support/fakes/fake_device.c tests/support/fakes/fake_device.h
	$(call step,CC,$@); mkdir -p $(@D) && $(CC) -std=gnu11 -O2 -Wall -Wextra -fPIC -shared -pthread -Ibuild/rdma-headers/usr/include $(filter %.c,$^) -o $@

# The endpoint that the tests of the fabric transport write to, and a library whose providers reach GPUs
# (tests/support/fakes).
FAKE_FABRIC := build/fake-fabric
fake-fabric: $(FAKE_FABRIC)/libfake_endpoint.so $(FAKE_FABRIC)/libfake_library.so
$(FAKE_FABRIC)/libfake_endpoint.so: tests/support/fakes/fake_endpoint.h
$(FAKE_FABRIC)/libfake_%.so: tests/support/fakes/fake_%.c
	$(call step,CC,$@); mkdir -p $(@D) && $(CC) -std=gnu11 -O2 -Wall -Wextra -fPIC -shared -pthread -Ibuild/fabric-headers/usr/include $(filter %.c,$^) -ldl -o $@

# The loops with which benchmarks compare the engine, and by which tests fill rings. They are not part of the package.
BARE_LOOPS := build/bare-loops/libbare_loops.so
bare-loops: $(BARE_LOOPS)
$(BARE_LOOPS): $(wildcard benchmarks/bare_loops/*.c benchmarks/bare_loops/*.h) proxy/engine/clock.h proxy/engine/ring.h proxy/engine/verbs_transport.h
	$(call step,CC,$@); mkdir -p $(@D) && $(CC) -std=gnu11 -O2 -Wall -Wextra -fPIC -shared -Iproxy/engine -Idevice/include \
	  -Ibuild/rdma-headers/usr/include -Ibuild/fabric-headers/usr/include $(filter %.c,$^) -o $@

# What the library, the examples and the build need; for GPUs only where there is one.
GPU_LOCK := $(if $(wildcard /dev/nvidiactl /dev/kfd),requirements-gpu.lock)
$(VENV)/.locked: requirements.lock $(GPU_LOCK)
	test -x $(BIN)/python || $(call step,INSTALL,requirements of the library in $(VENV))
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --no-compile $(addprefix -r ,$^)  # Python compiles the tenth that is used
	touch $@

# Shipped kernels are compiled at their first use (device/host/DESIGN.md).
$(VENV)/.built: $(VENV)/.locked $(SOURCES) | build/.headers
	$(call step,BUILD,C extensions)
	$(PIP_INSTALL) --no-build-isolation --no-deps --editable . --config-settings editable_mode=strict
	touch $@

# The headers that transports are built with. Where they can't be fetched, the next make tries again.
FETCH_HEADERS := $(PYTHON) tests/support/packages/fetch_headers.py
build/.headers: tests/support/packages/fetch_headers.py
	$(call step,FETCH,headers of libibverbs and libfabric)
	mkdir -p build; complete=1; \
	reason=$$($(FETCH_HEADERS) build/rdma-headers libibverbs-dev) || \
	  { [ $$? = 2 ] && complete= && echo "The engine is built without the transport verbs: $$reason"; } || exit 1; \
	reason=$$($(FETCH_HEADERS) build/fabric-headers libfabric-dev) || \
	  { [ $$? = 2 ] && complete= && echo "The engine is built without the transport fabric: $$reason"; } || exit 1; \
	if [ -n "$$complete" ]; then touch $@; fi

# What tests and lint need besides. With --no-deps pip looks only at what the lock names: another one may build meanwhile.
$(VENV)/.tools: requirements-test.lock requirements-gpu.lock requirements.lock | $(VENV)/.locked
	$(call step,INSTALL,tools of the tests)
	$(PIP_INSTALL) --no-compile --no-deps -r requirements-test.lock
	touch $@

$(VENV)/.docs-tools: requirements-docs.lock requirements-test.lock | $(VENV)/.installed
	$(call step,INSTALL,tools of the documentation)
	$(PIP_INSTALL) -r requirements-docs.lock
	touch $@

$(VENV)/.wheel-tools: requirements-wheel.lock requirements.lock | $(VENV)/.built
	$(call step,INSTALL,tools of the wheel)
	$(PIP_INSTALL) -r requirements-wheel.lock
	touch $@

$(VENV)/.installed: $(VENV)/.built $(VENV)/.tools
	touch $@

clean:
	rm -rf $(VENV) $(OWN_VENVS) build *.egg-info
