/* The host runtime: what a CUDA or HIP driver offers, on a CPU.
 *
 * Signatures and status codes of the calls that the proxy's engine makes (copy, write64, event record and query,
 * launch) are those of cuMemcpyAsync, cuStreamWriteValue64, cuEventRecord, cuEventQuery and cuLaunchKernel, so that
 * one function table serves all three runtimes.
 *
 *   fibers.cpp   threads of a block as fibers of one OS thread
 *   streams.cpp  streams, events and launches
 *   memory.cpp   memory that other processes can map
 */
#ifndef PROXYCCL_HOST_RUNTIME_H
#define PROXYCCL_HOST_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PROXYCCL_HOST_SUCCESS = 0,
  PROXYCCL_HOST_INVALID_VALUE = 1,
  PROXYCCL_HOST_NOT_FOUND = 500,
  PROXYCCL_HOST_NOT_READY = 600,
  PROXYCCL_HOST_LAUNCH_FAILED = 719,
  PROXYCCL_HOST_MAX_THREADS_PER_BLOCK = 1024,
  PROXYCCL_HOST_MAX_RESIDENT_BLOCKS = 512,
  PROXYCCL_HOST_MAX_SHARED_BYTES = 160 * 1024
};

/* A stream runs its operations in order. An inline stream runs them in the calling thread, before the call returns:
 * it takes no launch, and saves a proxy thread the hop to a second one. */
int proxyccl_host_stream_create(void** stream, int run_inline);
int proxyccl_host_stream_destroy(void* stream); /* waits for what was queued */
int proxyccl_host_stream_query(void* stream);
int proxyccl_host_stream_synchronize(void* stream);
int proxyccl_host_stream_wait_event(void* stream, void* event, unsigned flags);

int proxyccl_host_event_create(void** event);
int proxyccl_host_event_destroy(void* event);
int proxyccl_host_event_record(void* event, void* stream);
int proxyccl_host_event_query(void* event);
int proxyccl_host_event_synchronize(void* event);
int proxyccl_host_event_elapsed(float* milliseconds, void* start, void* end);

int proxyccl_host_copy(void* dst, const void* src, size_t bytes, void* stream);
int proxyccl_host_set(void* dst, int value, size_t bytes, void* stream);
int proxyccl_host_write64(void* stream, uint64_t* address, uint64_t value, unsigned flags);

int proxyccl_host_module_load(void** module, const char* path); /* stays loaded; error text by dlerror */
const char* proxyccl_host_module_error(void);
int proxyccl_host_module_function(void** function, void* module, const char* name);
/* The parameter table of kernel.h, or NULL. */
const uint32_t* proxyccl_host_function_parameters(void* function);
int proxyccl_host_launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                         void** extra);

/* Anonymous shared memory: lives while a descriptor or a mapping does, so nothing is left when a process is killed. */
int proxyccl_host_memory_create(int* descriptor, size_t bytes);
int proxyccl_host_memory_map(void** address, int descriptor, size_t bytes);
int proxyccl_host_memory_unmap(void* address, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
