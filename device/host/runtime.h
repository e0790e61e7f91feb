/* The host runtime: functions like those of CUDA's and HIP's drivers, on a CPU.
 *
 * Functions that C code calls have the signatures and status codes of the driver's functions, such as cuMemcpyAsync, so
 * that one function table serves all three runtimes.
 *
 *   fibers.cpp   the threads of a block, which are fibers of one OS thread
 *   waiting.cpp  the work of a waiting thread
 *   streams.cpp  streams, events and launches
 *   memory.cpp   memory that other processes can map
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "stream_operations.h"

enum {
  PROXYCCL_HOST_SUCCESS = 0,
  PROXYCCL_HOST_INVALID_VALUE = 1,
  PROXYCCL_HOST_OUT_OF_MEMORY = 2, /* out of memory or threads */
  PROXYCCL_HOST_NOT_FOUND = 500,
  PROXYCCL_HOST_NOT_READY = 600,
  PROXYCCL_HOST_IN_HANDLER = 601, /* a signal handler used the stream whose wait it interrupted */
  PROXYCCL_HOST_LAUNCH_FAILED = 719,
  PROXYCCL_HOST_MAX_THREADS_PER_BLOCK = 1024,
  PROXYCCL_HOST_MAX_RESIDENT_BLOCKS = 512,
  PROXYCCL_HOST_MAX_SHARED_BYTES = 160 * 1024,
  PROXYCCL_HOST_BUFFER_ID = 7 /* CU_POINTER_ATTRIBUTE_BUFFER_ID, HIP_POINTER_ATTRIBUTE_BUFFER_ID */
};

/* Kinds of streams: which thread runs the operations. */
enum {
  /* The stream's own thread. */
  PROXYCCL_HOST_QUEUED,
  /* The calling thread, before the call returns. Only one thread, a proxy's, may use the stream. Launches and waits are
   * refused. */
  PROXYCCL_HOST_INLINE,
  /* The calling thread, before the call returns. Launches and waits are allowed, and other threads' calls wait for the
   * running one. Failures are reported by query and synchronize. */
  PROXYCCL_HOST_IN_CALLER
};
int proxyccl_host_stream_create(void** stream, int kind);
int proxyccl_host_stream_destroy(void* stream); /* waits for queued work */
int proxyccl_host_stream_query(void* stream);
int proxyccl_host_stream_synchronize(void* stream);
/* Waits for the work queued so far, for at most `milliseconds`. Returns PROXYCCL_HOST_NOT_READY if the work is not
 * done, so that the caller can run signal handlers and call again. *target must be 0 in the first call, and unchanged
 * in later calls. */
int proxyccl_host_stream_await(void* stream, uint64_t* target, unsigned milliseconds);
int proxyccl_host_stream_wait_event(void* stream, void* event, unsigned flags);

int proxyccl_host_event_create(void** event);
int proxyccl_host_event_destroy(void* event);
int proxyccl_host_event_record(void* event, void* stream);
int proxyccl_host_event_query(void* event);
int proxyccl_host_event_await(void* event, uint64_t* target,
                              unsigned milliseconds); /* like proxyccl_host_stream_await() */
int proxyccl_host_event_elapsed(float* milliseconds, void* start, void* end);

int proxyccl_host_copy(void* dst, const void* src, size_t bytes, void* stream);
int proxyccl_host_set(void* dst, int value, size_t bytes, void* stream);
int proxyccl_host_write64(void* stream, uint64_t* address, uint64_t value, unsigned flags);
int proxyccl_host_write32(void* stream, uint32_t* address, uint32_t value, unsigned flags);
/* Queues writes of and waits for words as one operation. An inline stream refuses waits. */
int proxyccl_host_stream_operations(void* stream, unsigned count, ProxycclStreamOperation* operations, unsigned flags);

/* Registers a helper, such as a proxy of this process, whose work is done by waiting threads. Before a thread yields in
 * a kernel or a stream that waits, the thread calls help(argument, 1), which returns whether the helper made progress.
 * When a kernel ends, a thread calls help(argument, 0), so that the proxy takes the kernel's last triggers. One thread
 * at a time runs helpers, possibly on a kernel's stack. If memory runs out, the helper is silently not registered. */
void proxyccl_host_add_helper(int (*help)(void*, int), void* argument);
void proxyccl_host_remove_helper(void* argument); /* returns when no thread runs the helper */

/* Makes a thread call look(stream) every 50 ms while it waits in work of a PROXYCCL_HOST_IN_CALLER stream. The work
 * continues when look() returns. During look() the thread may not use PROXYCCL_HOST_IN_CALLER streams. */
void proxyccl_host_look_around(uint64_t thread, void (*look)(void* stream));
/* Whether the calling thread is in look(). */
int proxyccl_host_is_looking(void);

/* A module is a shared object with a control block. Modules may share one object, which is never unloaded. */
int proxyccl_host_module_load(void** module, const char* path); /* sets dlerror() on failure */
int proxyccl_host_module_unload(void* module);                  /* queued launches still run */
const char* proxyccl_host_module_error(void);
int proxyccl_host_module_function(void** function, void* module, const char* name); /* valid until the unload */
/* Returns the address of a variable, or NULL if there is none. Each module has its own proxyccl_default_control. */
void* proxyccl_host_module_variable(void* module, const char* name);
/* Returns the kernel's parameter table (kernel.h), or NULL if it has none. */
const uint32_t* proxyccl_host_function_parameters(void* function);
int proxyccl_host_launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                         void** extra);

/* Anonymous shared memory, which is freed with its last descriptor or mapping. */
int proxyccl_host_memory_create(int* descriptor, size_t bytes);
int proxyccl_host_memory_map(void** address, int descriptor, size_t bytes);
int proxyccl_host_memory_unmap(void* address, size_t bytes);
/* Frees the pages of mapped memory in all processes, which read zeros from then on. Returns 0 or an errno. */
int proxyccl_host_memory_discard(void* address, size_t bytes);
/* Moves a range to huge pages, if the kernel supports this. During the call the range stays usable. Stops after two
 * seconds, because peers may wait. Does nothing for memory that this runtime has not mapped. */
void proxyccl_host_memory_use_huge_pages(uint64_t ptr, size_t bytes);

/* Allocate and free memory like a driver's calls, by address. */
int proxyccl_host_allocate(uint64_t* ptr, size_t bytes);
int proxyccl_host_free(uintptr_t ptr);
/* Finds the allocation that contains an address. Returns PROXYCCL_HOST_NOT_FOUND for memory that
 * proxyccl_host_allocate() did not return. */
int proxyccl_host_allocation(uint64_t ptr, uint64_t* base, uint64_t* bytes, int* descriptor);
/* Stores the number of the mapping or allocation that contains an address. Numbers are never reused. */
int proxyccl_host_pointer_attribute(void* data, int attribute, uint64_t ptr);
