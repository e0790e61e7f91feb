/* A launch with packed arguments, and the function that issues it. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "waking.h"

typedef struct ProxycclLaunch {
  /* cuLaunchKernel, hipModuleLaunchKernel or proxyccl_host_launch */
  int (*call)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
              unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);
  /* Stores the thread's current context (cuCtxGetCurrent, hipGetDevice); NULL if there is none. */
  int (*current)(uint64_t* context);
  uint64_t context; /* the context that the function belongs to */
  void* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** parameters;
  const ProxycclSleepers* const*
      wakes; /* NULL-terminated list of the sleepers of the proxies that the kernel pushes to; or NULL */
} ProxycclLaunch;

enum { PROXYCCL_OTHER_CONTEXT = -1 };

/* Whether a context is the calling thread's current context. `current` is NULL if there is only one context. */
static inline int proxyccl_is_current(int (*current)(uint64_t* context), uint64_t context) {
  uint64_t here = 0;
  return current == NULL || (current(&here) == 0 && here == context);
}

static inline int proxyccl_launch_current(const ProxycclLaunch* launch, uintptr_t stream) {
  proxyccl_wake_all(launch->wakes);
  return launch->call(launch->function, launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0],
                      launch->block[1], launch->block[2], launch->shared_bytes, (void*)stream, launch->parameters,
                      NULL);
}

/* Issues a launch and returns the driver's status. Does nothing and returns PROXYCCL_OTHER_CONTEXT if
 * another context is current. */
static inline int proxyccl_launch(const ProxycclLaunch* launch, uintptr_t stream) {
  if (!proxyccl_is_current(launch->current, launch->context)) return PROXYCCL_OTHER_CONTEXT;
  return proxyccl_launch_current(launch, stream);
}
