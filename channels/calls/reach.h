/* The ranges of this rank's memory that its peers can access, and the ranges' addresses in the peers' address spaces.
 * Each call looks up its arrays in this table, with the GIL held. */
#ifndef PROXYCCL_REACH_H
#define PROXYCCL_REACH_H

#include "python_objects.h"

enum {
  PROXYCCL_REACHED_BY_KERNELS = 1, /* the kernels of all ranks can access the range */
  PROXYCCL_NAMED_BY_PROXIES = 2,   /* schedules may send from the range */
  PROXYCCL_RECEIVED_BY_PROXIES = 4 /* schedules may receive in the range */
};

typedef struct ReachedRange {
  long number; /* identifies the range when it is replaced or removed */
  uintptr_t start, end;
  unsigned reached;
  uintptr_t* bases; /* the address of `start` for each rank's kernels; NULL unless all kernels can access it */
  int (*holds)(const void*, uint64_t start,
               uint64_t end); /* holds(guard, …) returns whether the range still lies in the announced allocations */
  const void* guard;          /* NULL if the owner can't free the memory while it is announced */
  PyObject* kept;             /* an object that must live as long as the guard */
} ReachedRange;

typedef struct Reach {
  ReachedRange* ranges;
  size_t count, room;
} Reach;

/* Adds a range, or replaces the range with the same number. Takes over the range's references and memory. Returns 0, or
 * -1 with an exception. */
int proxyccl_set_reached(Reach* reach, const ReachedRange* range);
void proxyccl_unset_reached(Reach* reach, long number);
void proxyccl_clear_reach(Reach* reach);
int proxyccl_visit_reach(const Reach* reach, visitproc visit, void* arg);
/* Returns how peers can access an array, as a sum of flags such as PROXYCCL_REACHED_BY_KERNELS. Stores in `*by_kernels`
 * the array's range that kernels can access, or NULL. The range is valid until the next change of `reach`. */
unsigned proxyccl_find_reached(const Reach* reach, uintptr_t at, size_t bytes, const ReachedRange** by_kernels);

#endif
