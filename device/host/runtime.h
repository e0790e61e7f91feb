/* The host runtime: a CUDA or HIP driver's functions, on a CPU.
 *
 * Signatures and status codes of the calls that C code makes (copy, write, stream operations, event record and
 * query, launch, allocate, free, pointer attribute) are those of cuMemcpyAsync,
 * cuStreamWriteValue32, cuStreamWriteValue64, cuStreamBatchMemOp, cuEventRecord, cuEventQuery, cuLaunchKernel,
 * cuMemAlloc, cuMemFree and cuPointerGetAttribute, so that one function table serves all three runtimes.
 *
 *   fibers.cpp   threads of a block as fibers of one OS thread
 *   waiting.cpp  a thread's actions while it waits
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
  PROXYCCL_HOST_IN_HANDLER = 601, /* a signal handler may not use the object that it interrupts */
  PROXYCCL_HOST_LAUNCH_FAILED = 719,
  PROXYCCL_HOST_MAX_THREADS_PER_BLOCK = 1024,
  PROXYCCL_HOST_MAX_RESIDENT_BLOCKS = 512,
  PROXYCCL_HOST_MAX_SHARED_BYTES = 160 * 1024,
  PROXYCCL_HOST_BUFFER_ID = 7 /* CU_POINTER_ATTRIBUTE_BUFFER_ID: the number of a mapping; HIP has the same value */
};

/* The thread that runs a stream's operations, in order and one at a time. */
enum {
  /* The stream's own thread. */
  PROXYCCL_HOST_QUEUED,
  /* The calling thread, before the call returns. This is for a proxy's stream, which a single thread uses, and which
   * accepts neither launches nor waits. */
  PROXYCCL_HOST_INLINE,
  /* The calling thread, before the call returns, also for launches and waits; other threads' calls on the stream wait
   * until it has returned. As for a queued stream, query and synchronize report failures. */
  PROXYCCL_HOST_IN_CALLER
};
int proxyccl_host_stream_create(void** stream, int kind);
int proxyccl_host_stream_destroy(void* stream); /* waits for queued work */
int proxyccl_host_stream_query(void* stream);
int proxyccl_host_stream_synchronize(void* stream);
/* Synchronizes for at most this many milliseconds, then returns PROXYCCL_HOST_NOT_READY: the caller runs signal
 * handlers and calls again. *target must be 0 in the first call, which stores a number there that identifies the wait
 * in later calls. */
int proxyccl_host_stream_await(void* stream, uint64_t* target, unsigned milliseconds);
int proxyccl_host_stream_wait_event(void* stream, void* event, unsigned flags);

int proxyccl_host_event_create(void** event);
int proxyccl_host_event_destroy(void* event);
int proxyccl_host_event_record(void* event, void* stream);
int proxyccl_host_event_query(void* event);
int proxyccl_host_event_synchronize(void* event);
int proxyccl_host_event_await(void* event, uint64_t* target,
                              unsigned milliseconds); /* like proxyccl_host_stream_await() */
int proxyccl_host_event_elapsed(float* milliseconds, void* start, void* end);

int proxyccl_host_copy(void* dst, const void* src, size_t bytes, void* stream);
int proxyccl_host_set(void* dst, int value, size_t bytes, void* stream);
int proxyccl_host_write64(void* stream, uint64_t* address, uint64_t value, unsigned flags);
int proxyccl_host_write32(void* stream, uint32_t* address, uint32_t value, unsigned flags);
/* Queues operations on words as one operation. A wait polls its word in the thread that runs the stream, with ever
 * longer pauses; an inline stream accepts no wait. */
int proxyccl_host_stream_operations(void* stream, unsigned count, ProxycclStreamOperation* operations, unsigned flags);

/* Registers a helper. Threads of this process call help(argument, 1) while a kernel or a stream waits, before they
 * yield; help() returns whether it made progress. They call help(argument, 0) when a kernel ends, so that the helper
 * takes the kernel's last triggers. Only one thread at a time runs a helper, possibly on a kernel's stack. If memory is
 * short, the helper is not registered: helpers are optional. */
void proxyccl_host_add_helper(int (*help)(void*, int), void* argument);
void proxyccl_host_remove_helper(void* argument); /* returns when no thread is in the helper */

/* Makes one thread call look(stream) every 50 ms while work that the thread itself runs on a stream
 * (PROXYCCL_HOST_IN_CALLER) waits. The call is made on the thread's own stack, between two steps of that work, which
 * continues when it returns. During the call this thread may not run other work of such streams. */
void proxyccl_host_look_around(uint64_t thread, void (*look)(void* stream));
/* Whether the calling thread is in look(). */
int proxyccl_host_is_looking(void);

/* A module is one use of a shared object, which stays loaded. Modules of one object have different control blocks. */
int proxyccl_host_module_load(void** module, const char* path); /* after a failure, dlerror() gives the error text */
int proxyccl_host_module_unload(void* module);                  /* work that was queued before still runs */
const char* proxyccl_host_module_error(void);
int proxyccl_host_module_function(void** function, void* module, const char* name); /* lives as long as the module */
/* Returns the address of a variable, or NULL if there is none. Each module has its own proxyccl_default_control. */
void* proxyccl_host_module_variable(void* module, const char* name);
/* Returns the kernel's parameter table (kernel.h), or NULL if it has none. */
const uint32_t* proxyccl_host_function_parameters(void* function);
int proxyccl_host_launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                         void** extra);

/* Anonymous shared memory: it lives as long as a descriptor or a mapping does, so nothing remains when a process is
 * killed. */
int proxyccl_host_memory_create(int* descriptor, size_t bytes);
int proxyccl_host_memory_map(void** address, int descriptor, size_t bytes);
int proxyccl_host_memory_unmap(void* address, size_t bytes);
/* Moves a range that was used before to huge pages, if the kernel has them. During the call the range stays mapped and
 * usable. Stops after two seconds, because peers may wait. Does nothing for memory that proxyccl_host_memory_map() has
 * not mapped. */
void proxyccl_host_memory_use_huge_pages(uint64_t ptr, size_t bytes);

/* These two functions allocate and free memory as a driver's calls do: memory is freed by its address. */
int proxyccl_host_allocate(uint64_t* ptr, size_t bytes);
int proxyccl_host_free(uintptr_t ptr);
/* Finds the allocation of proxyccl_host_allocate that contains an address, or returns PROXYCCL_HOST_NOT_FOUND. */
int proxyccl_host_allocation(uint64_t ptr, uint64_t* base, uint64_t* bytes, int* descriptor);
/* Stores the unique number of the mapping that contains an address, whether mapped or allocated. */
int proxyccl_host_pointer_attribute(void* data, int attribute, uint64_t ptr);
