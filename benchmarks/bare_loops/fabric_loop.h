/* The first loop only writes through a libfabric endpoint; its rate is the provider's limit, with which benchmarks
 * compare the transport. The second loop runs in the process that is the target of the writes, and polls. */
#ifndef PROXYCCL_FABRIC_LOOP_H
#define PROXYCCL_FABRIC_LOOP_H

#include <stdint.h>

enum { PROXYCCL_FABRIC_BARE_DEPTH = 1024 };

typedef struct ProxycclFabricBareWrites {
  uintptr_t endpoint, queue; /* a fid_ep * and its fid_cq *, with no operation outstanding */
  uint64_t peer;             /* fi_addr_t */
  uint64_t local, remote;    /* each write's source and target */
  uintptr_t descriptor;      /* descriptor of `local` */
  uint64_t key;              /* key of `remote` */
  uint64_t bytes;            /* bytes of each write */
  uint32_t depth;            /* maximum number of outstanding writes: at most PROXYCCL_FABRIC_BARE_DEPTH */
  uint32_t complete_every;   /* every n-th write and the last write request a completion on delivery; n <= `depth` */
  uint64_t count;            /* number of writes */
  uint64_t timeout_ns;       /* time-out for all writes together */
} ProxycclFabricBareWrites;

/* Returns the nanoseconds from the first write to the last completion, or a negative libfabric error. */
int64_t proxyccl_fabric_bare_writes(const ProxycclFabricBareWrites* options);

/* Polls, for `for_ns`, a completion queue that gets no completions. Returns 0 or a libfabric error. */
int proxyccl_fabric_bare_serve(uintptr_t queue, uint64_t for_ns);

#endif
