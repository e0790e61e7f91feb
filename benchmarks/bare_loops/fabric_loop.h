/* A loop that only writes through a libfabric endpoint: it shows the provider's limit, with which benchmarks compare
 * the transport. The second loop only polls, as the target of such writes must. */
#ifndef PROXYCCL_FABRIC_LOOP_H
#define PROXYCCL_FABRIC_LOOP_H

#include <stdint.h>

enum { PROXYCCL_FABRIC_BARE_DEPTH = 1024 };

typedef struct ProxycclFabricBareWrites {
  uintptr_t endpoint, queue; /* fid_ep *, and its fid_cq *; no operation is outstanding on them */
  uint64_t peer;             /* fi_addr_t */
  uint64_t local, remote;    /* each write's source and target */
  uintptr_t descriptor;      /* descriptor of `local` */
  uint64_t key;              /* key of `remote` */
  uint64_t bytes;            /* bytes of each write */
  uint32_t depth;            /* most writes outstanding: at most PROXYCCL_FABRIC_BARE_DEPTH */
  uint32_t complete_every;   /* one write in this number, at most `depth`, and the last write have a completion, by
                                which the target reports delivery */
  uint64_t count;            /* number of writes */
  uint64_t timeout_ns;       /* time-out of all writes together */
} ProxycclFabricBareWrites;

/* Nanoseconds from the first write to the last completion; or the number of libfabric's error, negative. */
int64_t proxyccl_fabric_bare_writes(const ProxycclFabricBareWrites* options);

/* Polls a queue, which has no completions, for this long. Returns 0, or the number of libfabric's error. */
int proxyccl_fabric_bare_serve(uintptr_t queue, uint64_t for_ns);

#endif
