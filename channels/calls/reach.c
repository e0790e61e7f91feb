#include "reach.h"

#include <string.h>

static void release(ReachedRange* range) {
  PyMem_Free(range->bases);
  Py_XDECREF(range->kept);
}

int proxyccl_set_reached(Reach* reach, const ReachedRange* range) {
  proxyccl_unset_reached(reach, range->number);
  if (reach->count == reach->room) {
    const size_t room = reach->room == 0 ? 16 : 2 * reach->room;
    ReachedRange* ranges = PyMem_Realloc(reach->ranges, room * sizeof *ranges);
    if (ranges == NULL) {
      ReachedRange refused = *range;
      release(&refused);
      PyErr_NoMemory();
      return -1;
    }
    reach->ranges = ranges, reach->room = room;
  }
  reach->ranges[reach->count++] = *range;
  return 0;
}

void proxyccl_unset_reached(Reach* reach, long number) {
  for (size_t i = 0; i < reach->count; ++i) {
    if (reach->ranges[i].number != number) continue;
    ReachedRange removed = reach->ranges[i];
    reach->ranges[i] = reach->ranges[--reach->count];
    release(&removed); /* references are dropped last, because dropping them may run Python code */
    return;
  }
}

void proxyccl_clear_reach(Reach* reach) {
  while (reach->count > 0) proxyccl_unset_reached(reach, reach->ranges[0].number);
  PyMem_Free(reach->ranges);
  memset(reach, 0, sizeof *reach);
}

int proxyccl_visit_reach(const Reach* reach, visitproc visit, void* arg) {
  for (size_t i = 0; i < reach->count; ++i) Py_VISIT(reach->ranges[i].kept);
  return 0;
}

unsigned proxyccl_find_reached(const Reach* reach, uintptr_t at, size_t bytes, const ReachedRange** by_kernels) {
  unsigned reached = 0;
  *by_kernels = NULL;
  for (size_t i = 0; i < reach->count; ++i) {
    const ReachedRange* range = &reach->ranges[i];
    if (at < range->start || range->end < at + bytes || (range->reached & ~reached) == 0) continue;
    if (range->holds != NULL && !range->holds(range->guard, at, at + bytes)) continue;
    reached |= range->reached;
    if (range->bases != NULL && *by_kernels == NULL) *by_kernels = range;
  }
  return reached;
}
