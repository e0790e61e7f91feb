// A block's links to the blocks of the same number on all other ranks, which are mapped. Thread p serves rank p.
#pragma once

#include "proxyccl/proxyccl.h"
#include "team.h"

namespace proxyccl {

class Links {
 public:
  // Prefetches the words that the first post needs.
  PROXYCCL_DEVICE explicit Links(const ProxycclTeam& team) : control_(team.control) {
    const uint32_t peer = threadIdx.x;
    handles_ = peer < team.world_size && peer != team.rank;
    if (!handles_) return;
    const ProxycclLink& link = team.links[static_cast<uint64_t>(blockIdx.x) * team.world_size + peer];
    static_cast<ProxycclSemaphore&>(semaphore_) = link.semaphore;
    peer_ = link.peer;
    prefetch(semaphore_.outbound);
    prefetch(semaphore_.expected);
  }

  // Called by all threads: signals every peer. A peer that has waited for the signal sees all threads' earlier stores.
  PROXYCCL_DEVICE void post() const {
    syncThreadsSystem();
    if (handles_) semaphore_.signal();
  }
  // Called by all threads before they have stored anything: signals every peer. A peer that has waited for the signal
  // may load what this rank's earlier kernels wrote.
  PROXYCCL_DEVICE void postLoads() const {
    if (handles_) semaphore_.signalLoads();
  }
  PROXYCCL_DEVICE void awaitOne() const {
    semaphore_.wait(control_, PROXYCCL_WAIT_SM_SIGNAL, peer_, PROXYCCL_NO_CHANNEL);
  }
  // Called by all threads: waits for every peer's next signal.
  PROXYCCL_DEVICE void await() const {
    if (handles_) awaitOne();
    __syncthreads();
  }

 private:
  ProxycclControl* control_;
  Semaphore semaphore_{};
  uint32_t peer_ = 0;
  bool handles_;
};

}  // namespace proxyccl
