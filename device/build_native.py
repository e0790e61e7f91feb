"""Declares the extension `proxyccl.device._native`: the host runtime, and the structs that kernels and Python share.

setuptools runs this module at build time.
"""

import runpy
from pathlib import Path

import cffi

ROOT = Path(__file__).parent.parent
HEADERS = [
    *(f"device/include/proxyccl/{name}.h" for name in ("trigger", "control", "handles", "platform_host_memmove")),
    *(f"device/kernels/{name}.h" for name in ("arrived", "execution", "team", "flows", "packet_team")),
    "device/kernels/experts/experts.h",
    *(f"device/{name}.h" for name in ("waking", "launch", "stream_operations", "stream_order")),
    *(f"device/memory/{name}.h" for name in ("memory_pool", "places", "allocation_guard")),
    "device/host/runtime.h",
]
"""The headers that Python needs, each after the headers whose types it names."""
FUNCTIONS = """
#include <sched.h>
#include <time.h>

/* Asks a driver for a stream or an event until that is done, for some milliseconds at most. query is cuStreamQuery,
 * cuEventQuery or hip's. Returns its last status; they all answer PROXYCCL_HOST_NOT_READY while it is not done. */
static int proxyccl_driver_await(uintptr_t query, uintptr_t handle, unsigned milliseconds) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end = now.tv_sec * 1000000000ll + now.tv_nsec + milliseconds * 1000000ll;
  for (;;) {
    const int status = ((int (*)(void *))query)((void *)handle);
    if (status != PROXYCCL_HOST_NOT_READY) return status;
    sched_yield();
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec * 1000000000ll + now.tv_nsec > end) return status;
  }
}
/* Files the record, if no other has been filed, and ends the waits of all ranks of the host: recordError() of wait.h,
 * for the CPU, with the peers' control blocks by its own addresses. */
static void proxyccl_control_raise(ProxycclControl *control, const ProxycclErrorRecord *record,
                                   ProxycclControl *const *peers, uint32_t peer_count) {
  uint32_t *state = &control->error.state, empty = PROXYCCL_RECORD_EMPTY;
  if (__atomic_compare_exchange_n(state, &empty, PROXYCCL_RECORD_CLAIMED, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    /* All but the state, which is the record's first word. */
    __builtin_memcpy(state + 1, (const uint32_t *)record + 1, sizeof *record - sizeof *state);
    /* Pairs with the acquire in proxyccl_control_record(). */
    __atomic_store_n(state, PROXYCCL_RECORD_VALID, __ATOMIC_RELEASE);
  }
  for (uint32_t i = 0; i < peer_count; ++i) {
    uint32_t nobody = 0;
    uint32_t *failed_rank = &peers[i]->failed_rank;
    __atomic_compare_exchange_n(failed_rank, &nobody, control->rank + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  }
  for (uint32_t i = 0; i < peer_count; ++i) __atomic_store_n(&peers[i]->abort, record->code, __ATOMIC_RELEASE);
  __atomic_store_n(&control->abort, record->code, __ATOMIC_RELEASE);
}
static uint32_t proxyccl_control_abort(const ProxycclControl *control) {
  return __atomic_load_n(&control->abort, __ATOMIC_ACQUIRE);
}
/* One more than the rank of this host whose record says why this one must end; 0: there is none. */
static uint32_t proxyccl_control_failed_rank(const ProxycclControl *control) {
  return __atomic_load_n(&control->failed_rank, __ATOMIC_ACQUIRE);
}
/* Copies the record if it is valid. Returns its state. */
static uint32_t proxyccl_control_record(const ProxycclControl *control, ProxycclErrorRecord *record) {
  const uint32_t state = __atomic_load_n(&control->error.state, __ATOMIC_ACQUIRE);
  if (state == PROXYCCL_RECORD_VALID)
    __builtin_memcpy((uint32_t *)record + 1, (const uint32_t *)&control->error + 1, sizeof *record - sizeof state);
  return state;
}
/* Released after the rank's last use of its peers' memory; pairs with the acquire below. */
static void proxyccl_control_set_presence(ProxycclControl *control, uint32_t presence, uint32_t exchanges) {
  __atomic_store_n(&control->exchanges, exchanges, __ATOMIC_RELAXED);
  __atomic_store_n(&control->presence, presence, __ATOMIC_RELEASE);
}
static uint32_t proxyccl_control_presence(const ProxycclControl *control) {
  return __atomic_load_n(&control->presence, __ATOMIC_ACQUIRE);
}
/* Read after a presence of PROXYCCL_LEFT. */
static uint32_t proxyccl_control_exchanges(const ProxycclControl *control) {
  return __atomic_load_n(&control->exchanges, __ATOMIC_RELAXED);
}
static void proxyccl_control_ask(ProxycclControl *control, uint32_t question) {
  __atomic_store_n(&control->asked, question, __ATOMIC_RELAXED);
}
/* Copies the answer of the wait in this place to a question. Returns whether there is one. */
static int proxyccl_control_wait(const ProxycclControl *control, uint32_t place, uint32_t question,
                                 ProxycclWait *wait) {
  /* Pairs with the release in describeWait(). */
  if (__atomic_load_n(&control->waits[place].answered, __ATOMIC_ACQUIRE) != question) return 0;
  *wait = control->waits[place];
  return 1;
}
"""

declarations = runpy.run_path(str(ROOT / "device/build_declarations.py"))["declarations"]
ffi = cffi.FFI()
ffi.cdef(declarations("\n".join([*((ROOT / header).read_text() for header in HEADERS), FUNCTIONS])))
ffi.set_source(
    "proxyccl.device._native",
    "\n".join(f'#include "{header}"' for header in HEADERS) + FUNCTIONS,
    source_extension=".cpp",
    sources=[
        *(f"device/host/{name}.cpp" for name in ("fibers", "streams", "waiting", "memory")),
        *(f"device/memory/{name}.cpp" for name in ("memory_pool", "places")),
    ],
    depends=[*HEADERS, *(f"device/host/{name}.h" for name in ("fibers", "status", "link_old_symbols"))],
    include_dirs=[".", "device", "device/memory", "device/include", "device/host", "device/kernels"],
    # fibers.cpp calls ThreadSanitizer's functions for fibers, and must not be instrumented itself.
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden", "-fno-sanitize=thread"],
    extra_link_args=["-pthread"],
)
