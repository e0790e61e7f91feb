/* Implements the registered regions of an agent, which peers may reach through sockets. See transfers.h.
 *
 * A change of the regions only appends to a list. The next check of a peer's blocks merges the changes into the sorted
 * regions, so an agent that registers many regions in separate calls sorts them once. */
#include <errno.h>

#include "parts.h"

#define LONGEST_COPY_NS 30000000000u

static uint64_t count_of(const Buffer *regions) { return regions->used / sizeof(Bounds); }

static Bounds *each_of(const Buffer *regions) { return (Bounds *)regions->bytes; }

static int compare(const void *a, const void *b) {
  const Bounds *first = a, *second = b;
  if (first->start != second->start) return first->start < second->start ? -1 : 1;
  return (first->end > second->end) - (first->end < second->end);
}

/* Sets `reach` of each region. */
static void find_reaches(Bounds *regions, uint64_t count) {
  uint64_t reach = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (regions[i].end > reach) reach = regions[i].end;
    regions[i].reach = reach;
  }
  for (uint64_t i = count; i-- > 1;) {
    if (regions[i].start <= regions[i - 1].reach) regions[i - 1].reach = regions[i].reach;
  }
}

/* Merges the changes into the sorted regions. Needs no more memory than `spare` has. */
static void merge(Regions *regions) {
  if (regions->added.used == 0 && regions->removed.used == 0) return;
  const uint64_t old_count = count_of(&regions->sorted), new_count = count_of(&regions->added),
                 removed_count = count_of(&regions->removed);
  const Bounds *old = each_of(&regions->sorted), *new = each_of(&regions->added), *removed = each_of(&regions->removed);
  if (new_count > 0) qsort(each_of(&regions->added), new_count, sizeof *new, compare);
  if (removed_count > 0) qsort(each_of(&regions->removed), removed_count, sizeof *removed, compare);
  Bounds *merged = each_of(&regions->spare);
  uint64_t count = 0, o = 0, n = 0, r = 0;
  while (o < old_count || n < new_count) {
    const int takes_old = n == new_count || (o < old_count && compare(&old[o], &new[n]) <= 0);
    const Bounds *next = takes_old ? &old[o++] : &new[n++];
    while (r < removed_count && compare(&removed[r], next) < 0) ++r; /* a region that was not added */
    if (r < removed_count && compare(next, &removed[r]) == 0) {
      ++r;
    } else {
      merged[count++] = *next;
    }
  }
  find_reaches(merged, count);
  const Buffer sorted = regions->spare;
  regions->spare = regions->sorted;
  regions->sorted = sorted;
  regions->sorted.used = count * sizeof *merged;
  regions->spare.used = regions->added.used = regions->removed.used = 0;
}

/* Returns the regions of a device's memory, or of host memory if `staging` is NULL; NULL if out of memory. */
static Regions *regions_of(ProxycclAgent *agent, const ProxycclStaging *staging) {
  if (staging == NULL) return &agent->host;
  Device *device = agent->devices;
  while (device != NULL && device->staging != staging) device = device->next;
  if (device == NULL && (device = calloc(1, sizeof *device)) != NULL) {
    device->staging = staging;
    device->next = agent->devices;
    agent->devices = device;
  }
  return device == NULL ? NULL : &device->regions;
}

/* Appends regions to a list of changes, and allocates what `merge` will need. Returns 0 or ENOMEM. */
static int append(Regions *regions, const uint64_t *rows, uint64_t count, int adds) {
  Buffer *changes = adds ? &regions->added : &regions->removed;
  const uint64_t all = count_of(&regions->sorted) + count_of(&regions->added) + (adds ? count : 0);
  regions->spare.used = 0;
  Bounds *to = count == 0 ? NULL : (Bounds *)buffer_extend(changes, count * sizeof *to);
  if (to == NULL) return count == 0 ? 0 : ENOMEM;
  if (all > 0 && buffer_extend(&regions->spare, all * sizeof *to) == NULL) {
    changes->used -= count * sizeof *to;
    return ENOMEM;
  }
  for (uint64_t i = 0; i < count; ++i) to[i] = (Bounds){.start = rows[2 * i], .end = rows[2 * i] + rows[2 * i + 1]};
  return 0;
}

int proxyccl_agent_change_memory(ProxycclAgent *agent, const ProxycclStaging *staging, const uint64_t *rows,
                                 uint64_t count, int adds) {
  pthread_mutex_lock(&agent->lock);
  Regions *changed = regions_of(agent, staging);
  const int error = changed == NULL ? ENOMEM : append(changed, rows, count, adds);
  if (error == 0) ++agent->memory;
  const uint64_t last = agent->turns;
  const struct timespec deadline = agent_deadline(LONGEST_COPY_NS);
  while (error == 0 && !adds && count > 0 && staging != NULL && agent->stages.first != NULL &&
         ((Stage *)agent->stages.first)->turn <= last && !agent->stopped &&
         pthread_cond_timedwait(&agent->changed, &agent->lock, &deadline) == 0) {}
  pthread_mutex_unlock(&agent->lock);
  return error;
}

/* Returns whether regions, which may be adjacent or overlap, contain all bytes of a block. */
static int hold(Regions *regions, const struct iovec *block) {
  merge(regions);
  const Bounds *each = each_of(&regions->sorted);
  const uint64_t address = (uintptr_t)block->iov_base;
  uint64_t low = 0, high = count_of(&regions->sorted); /* `low`: regions that start at or before the block */
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (each[middle].start <= address) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > 0 && address <= each[low - 1].reach && each[low - 1].reach - address >= block->iov_len;
}

uint64_t agent_lacks(ProxycclAgent *agent, const struct iovec *blocks, uint64_t count, Device **device) {
  *device = NULL;
  for (uint64_t i = 0; i < count; ++i) {
    if (*device == NULL && hold(&agent->host, &blocks[i])) continue;
    if (i > 0 && *device == NULL) return i; /* all blocks must be in host memory if the first block is */
    Device *holds = agent->devices;
    while (holds != NULL && !hold(&holds->regions, &blocks[i])) holds = holds->next;
    if (holds == NULL) return i;
    if (i == 0) *device = holds;
  }
  return count;
}
